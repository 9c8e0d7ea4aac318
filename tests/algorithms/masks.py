"""Masks and batches for the tests of this folder."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)


@st.composite
def masks(draw: st.DrawFn, max_rows: int = 4, max_width: int = 6) -> Tensor:
    """A mask [B, S-1] of int64, with any pattern of holes, empty rows and empty batches included."""
    rows, width = draw(st.integers(0, max_rows)), draw(st.integers(0, max_width))
    bits = draw(st.lists(st.integers(0, 1), min_size=rows * width, max_size=rows * width))
    return torch.tensor(bits, dtype=torch.int64).reshape(rows, width)


def numbers(mask: Tensor, seed: int, scale: float = 1.0) -> Tensor:
    """Normal fp64 numbers of the mask's shape."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.normal(scale=scale, size=tuple(mask.shape)))


def spoil(values: Tensor, mask: Tensor) -> Tensor:
    """A copy with nan, inf, -inf and 1e30 where masked."""
    garbage = torch.tensor(GARBAGE, dtype=values.dtype).repeat(values.numel() // len(GARBAGE) + 1)
    return torch.where(mask != 0, values, garbage[: values.numel()].reshape(values.shape))


def grad(leaf: Tensor) -> Tensor:
    """The gradient that a leaf has received."""
    assert leaf.grad is not None
    return leaf.grad
