"""GRPO's credit and loss, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from roll.algorithms import group_moments, total_loss
from roll.algorithms.grpo import GRPO, GRPOSettings
from roll.config import ConfigError
from roll.protocol import DataProto, LossNormalizers
from roll.protocol.equality import same_value
from tests.algorithms.test_terms import Scripted, micro_batch
from tests.pipelines.grpo_run import grpo_config


def batch(scores: list[float], group: list[int]) -> DataProto:
    """Responses of two tokens and of one, in turn."""
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]).repeat(len(scores), 1)[: len(scores)]
    return DataProto.from_dict({"response_mask": mask, "scores": torch.tensor(scores), "group": torch.tensor(group)})


def test_moments_are_those_of_a_group() -> None:
    mean, std = group_moments(torch.tensor([1.0, 10.0, 3.0, 5.0, 10.0]), torch.tensor([4, 0, 4, 7, 0]))
    torch.testing.assert_close(mean, torch.tensor([2.0, 10, 2, 5, 10]).double())
    torch.testing.assert_close(std, torch.tensor([math.sqrt(2), 0, math.sqrt(2), 0, 0]).double())


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_by_hand(normalize_std: bool) -> None:
    # Group 0 has mean 2 and deviation sqrt((1 + 0 + 1) / 2) = 1; group 1 mean 5 and deviation sqrt(2 * 9).
    scores, group = [1.0, 2.0, 3.0, 2.0, 8.0], [0, 0, 0, 1, 1]
    before = batch(scores, group)
    credit = GRPO(GRPOSettings(normalize_std=normalize_std)).credit(before)
    of_row = [-1, 0, 1, -3, 3] if not normalize_std else [-1, 0, 1, -1 / math.sqrt(2), 1 / math.sqrt(2)]
    expected = torch.tensor(of_row).float().unsqueeze(1) * before["response_mask"][:, 1:]
    torch.testing.assert_close(credit.fields["advantages"], expected, rtol=0, atol=2e-6)
    assert credit.metrics == pytest.approx({"group_std": (3 * 1 + 2 * math.sqrt(18)) / 5})
    assert same_value(before.to_dict(), batch(scores, group).to_dict())


def test_equal_scores_teach_nothing() -> None:
    credit = GRPO(GRPOSettings()).credit(batch([0.1] * 3, [5] * 3))
    assert credit.fields["advantages"].abs().max() == 0


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="scores: row 1 has nan, which is not finite"):
        GRPO(GRPOSettings()).credit(batch([0.0, float("nan")], [0, 0]))


def test_the_loss_by_hand() -> None:
    # Advantages 1 and -3 at ratio 1, k3 of log 2 at the second token: a row's mean, over two sequences.
    terms = GRPO(GRPOSettings(kl_coef=0.5)).losses()["actor"]
    loss, _ = total_loss(terms, micro_batch(), Scripted())
    assert loss.item() == pytest.approx((2 / 2 + 0.5 * (1 - math.log(2)) / 2) / 2)
    (policy,) = GRPO(GRPOSettings(kl_coef=0.0, loss_agg="token-mean", clip_low=0.1, clip_high=0.3)).losses()["actor"]
    data = micro_batch().update({"log_probs": torch.tensor([[-1.0 - math.log(2), -2.0 + math.log(2)]])})
    # Ratios 2 and 1/2, clipped to 1.3 and 0.9: -1.3 and 0.9 * 3.
    clipped, _ = total_loss([policy], data.with_normalizers(LossNormalizers(4, 2)), Scripted())
    assert clipped.item() == pytest.approx((-1.3 + 2.7) / 4)


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [([], ("actor", "reference")), (["algorithm.kl_coef=0"], ("actor",))],
)
def test_there_is_a_reference_for_a_kl_term_only(overrides: list[str], roles: tuple[str, ...]) -> None:
    assert grpo_config(*overrides).model_roles == roles


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["responses_per_prompt=1"], "responses_per_prompt: must be at least 2 for grpo, got 1"),
        (["algorithm.critic={optimizer: {lr: 1.0}}"], "algorithm.critic: unknown setting; did you mean"),
        (["algorithm.kl.coef=0.1"], "algorithm.kl: unknown setting; did you mean algorithm.kl_coef?"),
        (["algorithm.kl_coef=-1"], "algorithm.kl_coef: must be greater than or equal to 0, got -1"),
    ],
)
def test_refusals(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        grpo_config(*overrides)
    assert any(text.startswith(line) for text in str(refused.value).splitlines())


def test_settings_of_roles_that_are_not_started_are_not_checked() -> None:
    wrong: list[Any] = ["reference.world_size=3", "reference.parallel.pp=2"]
    with pytest.raises(ConfigError, match=r"reference\.world_size: 3 is not a multiple"):
        grpo_config(*wrong)
    assert grpo_config(*wrong, "algorithm.kl_coef=0").reference.world_size == 3
