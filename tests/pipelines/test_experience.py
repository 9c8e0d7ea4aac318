"""The step from scores to advantages, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll.config import KLSettings, PPOSettings
from roll.pipelines.experience import add_advantages
from roll.protocol import DataProto


def ppo(**changes: Any) -> PPOSettings:
    base: dict[str, Any] = {
        "steps": 1,
        "prompts_per_step": 2,
        "mini_batch_size": 2,
        "gamma": 0.5,
        "lam": 1.0,
        "whiten_advantages": False,
        "kl": KLSettings(coef=0.1),
    }
    return PPOSettings(**(base | changes))


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
    learned, metrics = add_advantages(batch(), ppo(), kl_coef=0.1)
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


def test_scores_are_clipped_but_reported_as_they_are() -> None:
    learned, metrics = add_advantages(batch(), ppo(reward_clip=2.0), kl_coef=0.0)
    assert learned["returns"][1, 1] == pytest.approx(-2.0)
    assert metrics["reward"] == pytest.approx(-1.5)


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    learned, _ = add_advantages(batch(), ppo(whiten_advantages=True), kl_coef=0.1)
    kept = learned["advantages"][batch()["response_mask"][:, 1:].bool()]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.var(unbiased=False)) == pytest.approx(1.0, rel=1e-4)
