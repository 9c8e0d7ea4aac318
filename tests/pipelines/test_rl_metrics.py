"""Metrics of a step, joined from updates, responses and credit."""

from __future__ import annotations

import pytest
import torch

from roll.pipelines.rl_metrics import step_metrics, update_metrics
from roll.protocol import DataProto

BATCH = DataProto.from_dict(
    {
        "response_mask": torch.tensor([[0, 1, 1], [0, 1, 0]]),
        "scores": torch.tensor([1.0, 2.0]),
        "exact": torch.tensor([0.0, 1.0]),
        "entropy": torch.tensor([[0.5, 1.5], [1.0, 9.0]]),
    }
)


def test_the_sampling_policys_entropy_wins() -> None:
    responses = {"reward": 1.5, "exact_match": 0.5, "response_length": 1.5, "entropy": 1.0}
    assert step_metrics({"loss": 3.0, "entropy": 7.0}, BATCH, {"kl": 0.1}) == {"loss": 3.0, "kl": 0.1} | responses


def test_credit_takes_no_name_of_another_metric() -> None:
    with pytest.raises(ValueError, match=r"^credit has metrics named loss, reward, which the step itself reports$"):
        step_metrics({"loss": 3.0}, BATCH, {"reward": 1.0, "loss": 1.0, "kl": 0.1})


def test_a_loss_takes_no_name_of_another_metric() -> None:
    with pytest.raises(ValueError, match=r"^a loss has metrics named reward, which the step itself reports$"):
        step_metrics({"loss": 3.0, "reward": 1.0}, BATCH, {})
    with pytest.raises(ValueError, match=r"^two roles have a metric named critic/loss$"):
        update_metrics({"actor": [{"critic/loss": 1.0}], "critic": [{"loss": 2.0}]})
    assert update_metrics({"actor": [{"loss": 1.0}, {"loss": 3.0}], "critic": [{"loss": 5.0}]}) == {
        "loss": 2.0,
        "critic/loss": 5.0,
    }
