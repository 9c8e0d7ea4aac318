"""The policy's objective with and without an entropy bonus, on a strategy that answers from a script."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from roll.config import KLSettings, PPOSettings
from roll.protocol import DataProto, LossNormalizers
from roll.strategies.base import ModelOutput, TrainStrategy
from roll.strategies.objectives import policy_objective


class Scripted:
    """One row of two tokens; it counts how often their entropy is asked for."""

    def __init__(self) -> None:
        self.log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        self.entropies = 0

    def op_compute_log_probs(self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.log_probs

    def op_compute_log_probs_and_entropy(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.entropies += 1
        return self.log_probs, torch.tensor([[0.5, 1.5]])


def objective(entropy_coef: float) -> tuple[Scripted, Tensor, dict[str, Tensor]]:
    ppo = PPOSettings(
        steps=1, prompts_per_step=1, mini_batch_size=1, entropy_coef=entropy_coef, kl=KLSettings(coef=0.0)
    )
    data = DataProto.from_dict(
        {
            "input_ids": torch.zeros(1, 3, dtype=torch.long),
            "response_mask": torch.tensor([[0, 1, 1]]),
            "log_probs": torch.tensor([[-1.0, -2.0]]),
            "advantages": torch.tensor([[1.0, -3.0]]),
        }
    ).with_normalizers(LossNormalizers(tokens=2, sequences=1))
    strategy = Scripted()
    loss, metrics = policy_objective(cast(TrainStrategy, strategy), ppo, data, ModelOutput(torch.zeros(1)))
    return strategy, loss, metrics


def test_a_coefficient_of_zero_computes_no_entropy() -> None:
    strategy, loss, metrics = objective(0.0)
    assert strategy.entropies == 0 and "entropy" not in metrics
    assert loss.item() == pytest.approx((-1 + 3) / 2)  # Ratio 1.


def test_the_bonus_is_its_coefficient_times_the_mean_entropy() -> None:
    strategy, loss, metrics = objective(0.1)
    assert strategy.entropies == 1
    assert metrics["entropy"].item() == pytest.approx(1.0)
    assert loss.item() == pytest.approx((-1 + 3) / 2 - 0.1 * 1.0)
