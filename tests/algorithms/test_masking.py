"""Masked sums, means and whitening against NumPy and numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import masked_mean, masked_sum, whiten
from tests.algorithms.masks import grad, masks, numbers, spoil


def test_sum_and_mean_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 9.0], [9.0, 9.0, 9.0], [6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    assert masked_sum(values, mask).item() == 9.0
    assert masked_mean(values, mask).item() == 3.0
    assert masked_sum(values, mask, dim=1).tolist() == [3.0, 0.0, 6.0]
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 0.0, 6.0]
    assert masked_mean(values, mask, dim=0).tolist() == [3.5, 2.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_any_mask_dtype_means_the_same(dtype: torch.dtype) -> None:
    values, mask = torch.tensor([[1.0, 5.0]]), torch.tensor([[1, 0]]).to(dtype)
    assert masked_mean(values, mask).item() == 1.0
    assert whiten(values, mask).tolist() == [[0.0, 0.0]]


@given(masks(), st.integers(0, 99))
def test_mean_equals_numpy_and_ignores_what_is_masked(mask: Tensor, seed: int) -> None:
    values = numbers(mask, seed)
    kept = values.numpy()[mask.numpy() == 1]
    spoiled = spoil(values, mask).requires_grad_()
    mean = masked_mean(spoiled, mask)
    assert mean.item() == pytest.approx(kept.mean() if kept.size else 0.0, rel=1e-12)
    mean.backward()
    assert torch.equal(grad(spoiled), mask.double() / max(1, kept.size))


@given(masks(), st.integers(0, 99))
def test_whiten_equals_numpy(mask: Tensor, seed: int) -> None:
    values, keep = numbers(mask, seed), mask.numpy() == 1
    expected = np.zeros(tuple(mask.shape))
    if keep.any():
        kept = values.numpy()[keep]
        expected[keep] = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8)
    np.testing.assert_allclose(whiten(spoil(values, mask), mask).numpy(), expected, rtol=1e-9, atol=1e-12)


def test_whiten_by_hand() -> None:
    # Mean 2, population variance (1 + 1) / 2 = 1.
    whitened = whiten(torch.tensor([[1.0, 77.0], [3.0, 77.0]]), torch.tensor([[1, 0], [1, 0]]))
    torch.testing.assert_close(whitened, torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), atol=1e-7, rtol=0)


@pytest.mark.parametrize("kept", [0, 1])
def test_whiten_is_zero_for_no_or_one_token(kept: int) -> None:
    mask = torch.tensor([[kept, 0, 0]])
    assert whiten(torch.tensor([[5.0, math.nan, math.inf]]), mask).tolist() == [[0.0, 0.0, 0.0]]


def test_whiten_keeps_a_small_spread_beside_a_large_mean() -> None:
    values = torch.tensor([[10000.0, 10000.25, 10000.5, 10000.75] * 8])
    expected = (values.double().numpy() - 10000.375) / np.sqrt(0.078125 + 1e-8)
    np.testing.assert_allclose(whiten(values, torch.ones_like(values)).numpy(), expected, rtol=1e-6)


def test_whiten_of_equal_values_is_zero() -> None:
    values = torch.full((3, 7), 0.1)
    assert whiten(values, torch.ones(3, 7)).abs().max().item() < 1e-6
    assert whiten(values, torch.ones(3, 7)).dtype == torch.float32


@pytest.mark.parametrize("value", [0.1, 1e12, -3e38])
def test_whiten_of_equal_values_is_zero_however_large(value: float) -> None:
    assert whiten(torch.full((3, 7), value), torch.ones(3, 7)).abs().max().item() < 1e-6


def test_whiten_refuses_what_it_cannot_scale() -> None:
    values, mask = torch.tensor([[1.0, math.nan], [2.0, math.inf]]), torch.tensor([[1, 0], [1, 1]])
    with pytest.raises(ValueError, match=r"^values: row 1 has inf, which is not finite$"):
        whiten(values, mask)
    with pytest.raises(ValueError, match=r"^eps must be above 0, got 0$"):  # 0 / 0 of equal values
        whiten(torch.ones(1, 2), torch.ones(1, 2), eps=0)


@pytest.mark.parametrize("function", [masked_sum, masked_mean, whiten])
def test_shapes_must_agree(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"values \[2, 3\], mask \[2, 4\]"):
        function(torch.zeros(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"values \[2, 3\], mask \[3\]"):
        function(torch.zeros(2, 3), torch.ones(3))


@pytest.mark.parametrize("function", [masked_sum, masked_mean, whiten])
def test_inputs_stay_as_they_are(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    values, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 0]])
    function(values, mask)
    assert values.tolist() == [[1.0, 2.0]] and mask.tolist() == [[1, 0]]
    assert values._version == 0 and mask._version == 0
