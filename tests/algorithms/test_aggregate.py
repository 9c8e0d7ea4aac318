"""The aggregation modes against loops, and their independence of how a step is divided."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import LossAggregation, aggregate_loss
from roll.protocol.normalizers import LossNormalizers, count_loss_tokens
from tests.algorithms.masks import grad, masks, numbers, spoil

MODES = get_args(LossAggregation)
EXAMPLE = torch.tensor([[1.0, 2.0, 50.0], [50.0, 50.0, 50.0], [50.0, 6.0, 50.0]])
EXAMPLE_MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]])


def loop(losses: np.ndarray, mask: np.ndarray, mode: str) -> float:
    """The whole step's loss by definition, one row after the other."""
    rows = [losses[b][mask[b] == 1] for b in range(len(mask)) if mask[b].any()]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return float(np.concatenate(rows).mean())
    if mode == "seq-mean-token-sum":
        return float(np.mean([row.sum() for row in rows]))
    return float(np.mean([row.mean() for row in rows]))


@pytest.mark.parametrize(
    ("mode", "expected"), [("token-mean", 3.0), ("seq-mean-token-sum", 4.5), ("seq-mean-token-mean", 3.75)]
)
def test_by_hand(mode: LossAggregation, expected: float) -> None:
    normalizers = count_loss_tokens(EXAMPLE_MASK)
    assert normalizers == LossNormalizers(tokens=3, sequences=2)
    assert aggregate_loss(EXAMPLE, EXAMPLE_MASK, normalizers, mode).item() == expected
    # The same rows as a part of a step twice as large contribute half.
    twice = LossNormalizers(tokens=6, sequences=4)
    assert aggregate_loss(EXAMPLE, EXAMPLE_MASK, twice, mode).item() == expected / 2


@given(masks(max_rows=6), st.integers(0, 99), st.sampled_from(MODES), st.data())
def test_any_division_into_micro_batches_gives_the_loop(
    mask: Tensor, seed: int, mode: LossAggregation, data: st.DataObject
) -> None:
    rows = len(mask)
    weight = numbers(mask, seed).requires_grad_()
    spoiled = spoil(numbers(mask, seed + 1), mask)
    normalizers = count_loss_tokens(mask)

    whole = aggregate_loss(weight * spoiled, mask, normalizers, mode)
    expected = loop(weight.detach().numpy() * spoiled.numpy(), mask.numpy(), mode)
    assert whole.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)

    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), dtype=torch.int64)
    parts = []
    for part in range(3):  # a part may be empty, or have no loss token
        chosen = owner == part
        parts.append(aggregate_loss((weight * spoil(spoiled, mask))[chosen], mask[chosen], normalizers, mode))
    assert sum(part.item() for part in parts) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(masks(max_rows=6), st.integers(0, 99), st.sampled_from(MODES), st.data())
def test_gradients_add_up_over_micro_batches(
    mask: Tensor, seed: int, mode: LossAggregation, data: st.DataObject
) -> None:
    rows = len(mask)
    inputs, normalizers = numbers(mask, seed), count_loss_tokens(mask)

    def gradient(shares: list[Tensor]) -> float:
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        for share in shares:
            aggregate_loss((weight * inputs[share]).square(), mask[share], normalizers, mode).backward()
        return grad(weight).item()

    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)), dtype=torch.int64)
    expected = 2 * 0.7 * loop(inputs.square().numpy(), mask.numpy(), mode)
    assert gradient([torch.arange(rows)]) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert gradient([torch.nonzero(owner == part)[:, 0] for part in range(3)]) == pytest.approx(
        expected, rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalizers", [LossNormalizers(0, 0), LossNormalizers(5, 2)])
def test_nothing_to_train_on_is_an_exact_zero_with_zero_gradient(
    mode: LossAggregation, normalizers: LossNormalizers
) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    losses = weight * torch.tensor([[float("nan"), float("inf")], [1.0, 2.0]])
    loss = aggregate_loss(losses, torch.zeros(2, 2), normalizers, mode)
    loss.backward()
    assert loss.item() == 0.0 and loss.shape == ()
    # Masked losses reach nobody. What multiplies them inside the caller's own graph is the caller's to select away.
    assert grad(weight)[1].tolist() == [0.0, 0.0]


def test_tokens_in_a_step_counted_as_empty_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 loss tokens.*tokens=0"):
        aggregate_loss(EXAMPLE, EXAMPLE_MASK, LossNormalizers(0, 0), "token-mean")


def test_unknown_mode_and_unequal_shapes_are_refused() -> None:
    normalizers = count_loss_tokens(EXAMPLE_MASK)
    with pytest.raises(ValueError, match=r"loss_agg must be one of token-mean, .*, got 'mean'"):
        aggregate_loss(EXAMPLE, EXAMPLE_MASK, normalizers, "mean")  # type: ignore[arg-type]
    for mode in MODES:
        with pytest.raises(ValueError, match=r"values \[3, 3\], mask \[3, 2\]"):
            aggregate_loss(EXAMPLE, EXAMPLE_MASK[:, 1:], normalizers, mode)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_stay_as_they_are(mode: LossAggregation) -> None:
    losses, mask = EXAMPLE.clone(), EXAMPLE_MASK.clone()
    aggregate_loss(losses, mask, count_loss_tokens(mask), mode)
    assert torch.equal(losses, EXAMPLE) and torch.equal(mask, EXAMPLE_MASK)
    assert losses._version == 0 and mask._version == 0
