"""Sums, means and whitening over the tokens that count.

A mask keeps the tokens where it is not zero (bool, integer or float). What stands at the other places may be anything,
also inf and nan: it is replaced by zero before any arithmetic, because `nan * 0` is nan, in the value and in the
gradient. No denominator here is smaller than one, so that an empty selection gives zero and can be backpropagated.

Shapes: B rows, S padded length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.errors import UserError


def check_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError if the named tensors differ in shape: broadcasting `[B, S]` with `[B, S-1]` is never meant."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise UserError(f"these tensors must have one shape: {shapes}")


def check_finite(mask: Tensor | None = None, /, **tensors: Tensor) -> None:
    """Raise ValueError if a named tensor has a NaN or an infinity where the mask keeps it: its name, row and value.

    For what is computed once a step from the outside (rewards, advantages). Losses check nothing: a fault there shows
    in the gradient's norm, and the step is skipped.

    Args:
        mask: of the tensors' shape; None keeps everything.
        tensors: `[B, ...]`.
    """
    for name, tensor in tensors.items():
        wrong = ~tensor.isfinite() if mask is None else ~select(tensor, mask).isfinite()
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise UserError(f"{name}: row {place[0]} has {tensor[tuple(place)].item()}, which is not finite")


def select(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask keeps them, zero (with zero gradient) elsewhere. A new tensor of the same shape.

    Raises ValueError if the shapes differ.
    """
    check_same_shape(values=values, mask=mask)
    return values.masked_fill(mask == 0, 0)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the kept values, over everything (a scalar) or along `dim`."""
    kept = select(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the kept values, over everything (a scalar) or along `dim`; zero where nothing is kept."""
    keep = mask != 0
    count = keep.sum() if dim is None else keep.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale the kept values to mean 0 and variance 1 over the whole batch; zero elsewhere.

    The variance is that of the population (divided by the count, as in OpenAI baselines' `ppo2`), so one kept value
    gives 0, equal values give 0, and none gives all zeros. `eps` is added to the variance. Moments are taken in fp64:
    the spread of advantages may be small beside their mean. Give it the batch of all data-parallel ranks; whitened
    shares differ.

    Args:
        values: [B, S-1] floating point.
        mask: [B, S-1].
        eps: above 0.

    Raises:
        ValueError: unequal shapes, a kept value that is not finite (with its row), or eps not above 0.
    """
    if not eps > 0:
        raise UserError(f"eps must be above 0, got {eps}")
    check_finite(mask, values=values)
    exact = select(values, mask).double()
    centred = exact - masked_mean(exact, mask)
    variance = masked_mean(centred.square(), mask)
    return select(centred * torch.rsqrt(variance + eps), mask).to(values.dtype)
