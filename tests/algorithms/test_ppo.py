"""The step from scores to advantages, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.algorithms import KLSettings
from roll.algorithms.ppo import PPO, PPOSettings
from roll.config import OptimizerSettings, TrainRoleSettings
from roll.pipelines.rl_metrics import response_metrics
from roll.protocol import DataProto
from roll.protocol.equality import same_value


def ppo(**changes: Any) -> PPO:
    base: dict[str, Any] = {
        "critic": TrainRoleSettings(optimizer=OptimizerSettings(lr=1e-3)),
        "gamma": 0.5,
        "lam": 1.0,
        "whiten_advantages": False,
        "kl": KLSettings(coef=0.1),
    }
    return PPO(PPOSettings(**(base | changes)))


def learned_from(batch: DataProto, algorithm: PPO) -> tuple[DataProto, dict[str, float]]:
    """The batch with what credit adds, and all metrics of the step."""
    before = batch.clone()
    credit = algorithm.credit(batch)
    assert (
        same_value(batch.to_dict(), before.to_dict())
        and credit.fields.keys() == algorithm.makes
        and credit.kept is None
    )
    return batch.update(credit.fields), response_metrics(batch) | dict(credit.metrics)


def batch() -> DataProto:
    """Two rows: a response of two tokens at positions 2, 3 and one of a single token at position 2."""
    return DataProto.from_dict(
        {
            "response_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
            "scores": torch.tensor([1.0, -4.0]),
            "exact": torch.tensor([1.0, 0.0]),
            "log_probs": torch.tensor([[0.0, -1.0, -2.0], [0.0, -1.0, 0.0]]),
            "ref_log_probs": torch.tensor([[0.0, -1.5, -2.0], [0.0, -3.0, 0.0]]),
            "values": torch.tensor([[9.0, 0.2, 0.4], [9.0, 0.5, 9.0]]),
            "entropy": torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]]),
        }
    )


def test_advantages_and_metrics_by_hand() -> None:
    learned, metrics = learned_from(batch(), ppo())
    # Row 0: k1 is 0.5, 0.0, so rewards are -0.05 and 1. Row 1: k1 is 2, the reward -4 - 0.2.
    # delta(1) = 1 - 0.4 = 0.6; delta(0) = -0.05 + 0.5 * 0.4 - 0.2 = -0.05; A(0) = -0.05 + 0.5 * 0.6 = 0.25.
    expected = torch.tensor([[0.0, 0.25, 0.6], [0.0, -4.7, 0.0]])
    torch.testing.assert_close(learned["advantages"], expected)
    torch.testing.assert_close(learned["returns"], torch.tensor([[0.0, 0.45, 1.0], [0.0, -4.2, 0.0]]))
    assert metrics["reward"] == pytest.approx(-1.5)
    assert metrics["exact_match"] == pytest.approx(0.5)
    assert metrics["kl"] == pytest.approx((0.5 + 2.0) / 2)
    assert metrics["response_length"] == pytest.approx(1.5)
    assert metrics["entropy"] == pytest.approx(2.0)
    assert metrics["kl_coef"] == 0.1


def test_a_reference_is_needed_for_a_penalty_only() -> None:
    penalised, free = ppo(), ppo(kl=KLSettings(coef=0.0))
    assert penalised.roles == {"actor", "critic", "reference"} and "ref_log_probs" in penalised.reads
    assert free.roles == {"actor", "critic"} and "ref_log_probs" not in free.reads


def test_scores_are_clipped_but_reported_as_they_are() -> None:
    learned, metrics = learned_from(batch(), ppo(reward_clip=2.0, kl=KLSettings(coef=0.0)))
    assert learned["returns"][1, 1] == pytest.approx(-2.0)
    assert metrics["reward"] == pytest.approx(-1.5)


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    learned, _ = learned_from(batch(), ppo(whiten_advantages=True))
    kept = learned["advantages"][batch()["response_mask"][:, 1:].bool()]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.var(unbiased=False)) == pytest.approx(1.0, rel=1e-4)


def twenty_tokens(log_ratio: float) -> DataProto:
    """Four responses of five tokens with advantages -1 and 1 before the penalty; the first token has the log ratio."""
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[:, 0] = 0
    zeros, reference = torch.zeros(4, 5), torch.zeros(4, 5)
    reference[0, 0] = log_ratio
    return DataProto.from_dict(
        {
            "response_mask": mask,
            "scores": torch.tensor([1.0, -1.0, 1.0, -1.0]),
            "exact": torch.zeros(4),
            "log_probs": zeros,
            "ref_log_probs": reference,
            "values": zeros.clone(),
            "entropy": zeros.clone(),
        }
    )


def test_one_enormous_log_ratio_leaves_all_advantages_finite() -> None:
    # k3 of 100 is 10: the first token's reward is -0.1 * 10, and with gamma 1 its advantage 1 - 1 = 0.
    settings = {"gamma": 1.0, "kl": KLSettings(coef=0.1, estimator="k3")}
    learned, metrics = learned_from(twenty_tokens(100.0), ppo(**settings))
    expected = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).expand(4, 5).clone()
    expected[0, 0] = 0.0
    torch.testing.assert_close(learned["advantages"], expected)
    assert metrics["kl"] == pytest.approx(10 / 4)
    # Mean -1/20, mean square 19/20.
    whitened, _ = learned_from(twenty_tokens(100.0), ppo(**settings, whiten_advantages=True))
    torch.testing.assert_close(whitened["advantages"], (expected + 0.05) / (0.95 - 0.05**2) ** 0.5)


def test_without_a_penalty_the_reference_is_not_looked_at() -> None:
    settings = ppo(gamma=1.0, whiten_advantages=True, kl=KLSettings(coef=0.0, estimator="k3"))
    expected = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).expand(4, 5)
    for log_ratio in (100.0, float("inf")):
        learned, metrics = learned_from(twenty_tokens(log_ratio), settings)
        torch.testing.assert_close(learned["advantages"], expected)
        assert "kl" not in metrics and metrics["kl_coef"] == 0.0
    rest = [name for name in twenty_tokens(0.0).tensors if name != "ref_log_probs"]
    learned, _ = learned_from(twenty_tokens(0.0).select(rest), settings)
    torch.testing.assert_close(learned["advantages"], expected)


@pytest.mark.parametrize("name", ["scores", "log_probs", "ref_log_probs", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_its_row(name: str, value: float) -> None:
    faulty = batch().clone()
    faulty[name][1, ...] = value
    settings = ppo(reward_clip=2.0)  # It would turn an infinite score into 2.
    with pytest.raises(ValueError, match=rf"^{name}: row 1 has {value}, which is not finite$"):
        settings.credit(faulty)
