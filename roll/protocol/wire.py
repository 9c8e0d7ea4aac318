"""Tensors as they travel: a header that names them, and their values as runs of bytes.

Nothing is encoded, so every dtype is exact, also under a backend that does not know it. The values of each dtype stand
together, those of the widest dtype first, so every tensor starts where its dtype may start:

    specs  input_ids int64 [2, 3], mask bool [2, 3], advantages float32 [2, 2]
    bytes  input_ids 48 | advantages 16 | mask 6

A large tensor is a run of its own, so that it can be sent out of its own memory. Small neighbours share one, since each
run is a message. A receiver has all runs in one piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

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


LARGE_BYTES = 1 << 16
"""Size from which a tensor is a run of its own: one more message takes less time than a copy of it."""


def run_sizes(specs: Sequence[TensorSpec]) -> list[int]:
    """The bytes of each run, in the order in which they travel."""
    return [sum(spec.num_bytes for spec in run) for run in _runs(specs)]


def as_runs(tensors: Mapping[str, Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """The values as uint8 runs. A large tensor that is contiguous is not copied: its run is a view of it."""
    return [joined([_bytes(tensors[spec.name]) for spec in run]) for run in _runs(specs)]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """These bytes one after the other; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _runs(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """The tensors of each run."""
    runs = groupby(_ordered(specs), key=lambda spec: spec.name if spec.num_bytes >= LARGE_BYTES else None)
    return [[*run] for _, run in runs]


def _bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor of any memory layout, as uint8 in one dimension."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # Every second value of a tensor, say; also where that is one value, or none.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def unflatten(flat: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """The tensors whose runs lie one after the other in `flat`, in the order of `specs`. They are views of `flat`."""
    found = {spec.name: values for spec, values in _parts(specs, flat)}
    return {spec.name: found[spec.name] for spec in specs}


def _parts(specs: Sequence[TensorSpec], flat: Tensor) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Each tensor's place in `flat`."""
    start = 0
    for spec in _ordered(specs):
        end = start + spec.num_bytes
        yield spec, flat[start:end].view(spec.dtype).view(spec.shape)
        start = end


def _ordered(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return sorted(specs, key=lambda spec: (-spec.dtype.itemsize, str(spec.dtype)))
