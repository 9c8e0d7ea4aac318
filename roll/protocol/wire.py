"""Tensors as they travel: a header that names them, and their values as one run of bytes.

Nothing is encoded, so every dtype is exact, also under a backend that does not know it. The values of each dtype stand
together, those of the widest dtype first, so every tensor starts where its dtype may start:

    specs  input_ids int64 [2, 3], mask bool [2, 3], advantages float32 [2, 2]
    bytes  input_ids 48 | advantages 16 | mask 6
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """One tensor, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Specs = tuple[TensorSpec, ...]


def specs_of(tensors: Mapping[str, Tensor]) -> Specs:
    """What there is to say of these tensors beside their values, in their order."""
    return tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """The bytes that the values of these tensors take."""
    return sum(spec.num_bytes for spec in specs)


def flatten(tensors: Mapping[str, Tensor], specs: Sequence[TensorSpec], out: Tensor) -> None:
    """Copy the values into `out`, uint8 `[total_bytes]` on any device. Tensors may have any memory layout."""
    for spec, values in _parts(specs, out):
        values.copy_(tensors[spec.name].detach())


def unflatten(flat: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The tensors whose values `flatten` wrote, in the order of `specs`. They are views of `flat`."""
    found = {spec.name: values for spec, values in _parts(specs, flat)}
    return {spec.name: found[spec.name] for spec in specs}


def _parts(specs: Sequence[TensorSpec], flat: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each tensor's place in `flat`."""
    start = 0
    for spec in sorted(specs, key=lambda spec: (-spec.dtype.itemsize, str(spec.dtype))):
        end = start + spec.num_bytes
        yield spec, flat[start:end].view(spec.dtype).view(spec.shape)
        start = end
