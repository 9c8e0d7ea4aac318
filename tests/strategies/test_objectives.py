"""The policy's objective with and without an entropy bonus, on an output that answers from a script."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roll.config import KLSettings, PPOSettings
from roll.protocol import DataProto, LossNormalizers
from roll.strategies import ModelOutput
from roll.strategies.objectives import policy_objective


class Scripted(ModelOutput):
    """One row of two tokens; it counts how often their entropy is asked for."""

    def __init__(self) -> None:
        self.known = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        self.entropies = 0

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.known

    def entropy(self, attention_mask: Tensor) -> Tensor:
        self.entropies += 1
        return torch.tensor([[0.5, 1.5]])

    def log_probs_and_entropy(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.known, self.entropy(attention_mask)

    def values(self, attention_mask: Tensor) -> Tensor:
        raise AssertionError("a policy has no values")

    def logits(self) -> Tensor:
        raise AssertionError("this loss needs no logits")

    def row_logits(self) -> Tensor:
        raise AssertionError("this loss needs no logits")


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
    output = Scripted()
    loss, metrics = policy_objective(ppo, data, output)
    return output, loss, metrics


def test_a_coefficient_of_zero_computes_no_entropy() -> None:
    output, loss, metrics = objective(0.0)
    assert output.entropies == 0 and "entropy" not in metrics
    assert loss.item() == pytest.approx((-1 + 3) / 2)  # Ratio 1.


def test_the_bonus_is_its_coefficient_times_the_mean_entropy() -> None:
    output, loss, metrics = objective(0.1)
    assert output.entropies == 1
    assert metrics["entropy"].item() == pytest.approx(1.0)
    assert loss.item() == pytest.approx((-1 + 3) / 2 - 0.1 * 1.0)
