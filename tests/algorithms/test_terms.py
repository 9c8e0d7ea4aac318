"""Terms of losses and their sum, on an output that answers from a script."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.algorithms import KLSettings, entropy_term, kl_term, policy_term, total_loss, value_term
from roll.algorithms.loss_term import LossTerm, TokenLoss
from roll.algorithms.ppo import PPO, PPOSettings
from roll.config import OptimizerSettings, TrainRoleSettings
from roll.protocol import DataProto, LossNormalizers
from roll.strategies import ModelOutput


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


def micro_batch() -> DataProto:
    return DataProto.from_dict(
        {
            "input_ids": torch.zeros(1, 3, dtype=torch.long),
            "response_mask": torch.tensor([[0, 1, 1]]),
            "log_probs": torch.tensor([[-1.0, -2.0]]),
            "ref_log_probs": torch.tensor([[-1.0, -2.0 + math.log(2)]]),
            "advantages": torch.tensor([[1.0, -3.0]]),
        }
    ).with_normalizers(LossNormalizers(tokens=4, sequences=2))  # Another micro-batch has the others.


def objective(entropy_coef: float) -> tuple[Scripted, Tensor, dict[str, Tensor]]:
    critic = TrainRoleSettings(optimizer=OptimizerSettings(lr=1e-3))
    ppo = PPO(PPOSettings(critic=critic, entropy_coef=entropy_coef, kl=KLSettings(coef=0.0)))
    output = Scripted()
    loss, metrics = total_loss(ppo.losses()["actor"], micro_batch(), output)
    return output, loss, metrics


def test_a_coefficient_of_zero_computes_no_entropy() -> None:
    output, loss, metrics = objective(0.0)
    assert output.entropies == 0 and "entropy" not in metrics
    assert loss.item() == pytest.approx((-1 + 3) / 4)  # Ratio 1.


def test_the_bonus_is_its_coefficient_times_the_mean_entropy() -> None:
    output, loss, metrics = objective(0.1)
    assert output.entropies == 1
    assert metrics["entropy"].item() == pytest.approx(2.0 / 4)
    assert loss.item() == pytest.approx((-1 + 3) / 4 - 0.1 * 2.0 / 4)


def test_each_term_is_divided_by_its_own_normaliser() -> None:
    """Sums over the row's tokens: the policy's -1 + 3 = 2, the entropy's 2, k3's 2 - 1 - log 2 at one of two tokens."""
    k3 = 1 - math.log(2)
    terms = [
        entropy_term(0.5, per="seq-mean-token-mean"),
        policy_term(0.2, 0.2, per="seq-mean-token-sum"),
        kl_term(3.0, "k3", per=5.0),
    ]
    loss, metrics = total_loss(terms, micro_batch(), Scripted())
    assert loss.item() == pytest.approx(0.5 * -(2 / 2) / 2 + 2 / 2 + 3 * k3 / 5)
    # Metrics are means over tokens, whatever divides the loss.
    expected = {"entropy": 2 / 4, "ratio": 2 / 4, "clip_fraction": 0, "approx_kl": 0, "kl": k3 / 4}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)
    assert not any(value.requires_grad for value in metrics.values())


def test_fields_that_terms_say_they_read() -> None:
    reads = [entropy_term(1.0, per=1.0), policy_term(0.2, 0.2, per=1.0), kl_term(1.0, "k1", per=1.0)]
    reads.append(value_term(None, per=1.0))
    assert [sorted(term.reads) for term in reads] == [
        [],
        ["advantages", "log_probs"],
        ["ref_log_probs"],
        ["returns", "values"],
    ]


def test_two_metrics_of_one_name_are_refused() -> None:
    terms = [policy_term(0.2, 0.2, per=1.0), policy_term(0.1, 0.1, per=1.0)]
    with pytest.raises(ValueError, match="two terms of a loss have a metric named approx_kl, clip_fraction, ratio"):
        total_loss(terms, micro_batch(), Scripted())


def test_a_metric_that_every_step_has_is_refused() -> None:
    def named_as_the_steps(data: DataProto, output: ModelOutput) -> TokenLoss:
        loss = data["advantages"]
        return loss, {"lr": loss, "own": loss, "grad_norm": loss}

    with pytest.raises(ValueError, match="a term of a loss has a metric named grad_norm, lr, as the step itself has"):
        total_loss([LossTerm(function=named_as_the_steps)], micro_batch(), Scripted())


def reads_more(data: DataProto, output: ModelOutput) -> TokenLoss:
    return data["returns"], {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda data, output: data["advantages"], r"must give a loss per token and a dict of metrics, got a Tensor"),
        (lambda data, output: (data["advantages"].mean(), {}), r"its loss must be a tensor \[1, 2\], .*; got \[\]"),
        (lambda data, output: (data["advantages"], {"nll": 0.5}), r"nll must be a tensor \[1, 2\], .*; got float"),
        (reads_more, r"loss term reads_more reads a field that its `reads` does not name: the batch lacks returns"),
    ],
)
def test_a_term_that_gives_something_else_is_named(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        total_loss([LossTerm(function=function)], micro_batch(), Scripted())


def test_a_term_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="reads of a term is a set of names of fields, got 'advantages'"):
        LossTerm(function=reads_more, reads="advantages")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the weight of a term must be finite, got nan"):
        LossTerm(function=reads_more, weight=math.nan)


@pytest.mark.parametrize("number", [0, -1.0, float("inf"), float("nan")])
def test_a_loss_is_divided_by_a_number_above_zero(number: float) -> None:
    with pytest.raises(ValueError, match=f"divided by a finite number above 0, got {number}"):
        policy_term(0.2, 0.2, per=number)


def test_a_term_with_an_unknown_normaliser_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"loss_agg must be one of token-mean, .*, got 'tokens'"):
        policy_term(0.2, 0.2, per="tokens")  # type: ignore[arg-type]
