"""An update of an engine's weights in buckets, and the checks of what arrives.

    version   which update it is, counted by whoever sends it
    shapes    every tensor of the update, declared before the first bucket
    buckets   portions of whole tensors under the names of the model's family, numbered from 0, each with a checksum

An update is taken as a whole, or an engine says that it has no weights (see `Generator`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll.config import DType
from roll.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Bucket:
    """A portion of an update."""

    version: int
    index: int
    tensors: Mapping[str, Tensor]
    checksum: int

    @classmethod
    def of(cls, version: int, index: int, tensors: Mapping[str, Tensor]) -> Bucket:
        """The bucket of these tensors, on the CPU, with their checksum."""
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        return cls(version, index, tensors, checksum(tensors))


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Sum of all bytes as words of 64 bits, modulo 2**64: nearly as fast as memory is read."""
    import torch

    total = 0
    for tensor in tensors.values():
        data = tensor.detach().contiguous().flatten().view(torch.uint8)
        words = len(data) // 8 * 8
        total += int(data[:words].view(torch.int64).sum()) + int(data[words:].sum())
    return total % 2**64


class WrongWeights(UserError):
    """An update, or a bucket of one, that an engine cannot take."""


class WeightUpdate:
    """The receiving end of one update.

    Args:
        shapes: what the sender declares.
        wanted: what the engine has.
        dtype: of all tensors.

    Raises WrongWeights if the two differ.
    """

    def __init__(self, version: int, shapes: Shapes, wanted: Shapes, dtype: DType) -> None:
        problems = [f"{name} is missing" for name in wanted if name not in shapes]
        for name, shape in shapes.items():
            own = wanted.get(name)
            if own is None:
                problems.append(f"{name} is unknown")
            elif tuple(own) != tuple(shape):
                problems.append(f"{name} has shape {tuple(shape)}, the engine has {tuple(own)}")
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise WrongWeights(f"weights of version {version} do not fit: {'; '.join(problems[:3])}{more}")
        self.version, self._shapes, self._missing, self._buckets = version, shapes, set(shapes), 0
        self._dtype = dtype

    def check(self, bucket: Bucket) -> None:
        """Raise WrongWeights unless `bucket` is the next one of this update, and whole."""
        where = f"bucket {bucket.index} of version {bucket.version}"
        if bucket.version != self.version:
            raise WrongWeights(f"{where} came in the update to version {self.version}")
        if bucket.index != self._buckets:
            raise WrongWeights(f"{where} came where bucket {self._buckets} was due")
        for name, tensor in bucket.tensors.items():
            if name not in self._shapes:
                raise WrongWeights(f"{where}: {name} was not declared")
            if name not in self._missing:
                raise WrongWeights(f"{where}: {name} came before")
            if tuple(tensor.shape) != tuple(self._shapes[name]):
                shapes = f"shape {tuple(tensor.shape)}, declared was {tuple(self._shapes[name])}"
                raise WrongWeights(f"{where}: {name} has {shapes}")
            if str(tensor.dtype) != f"torch.{self._dtype}":
                raise WrongWeights(f"{where}: {name} has type {tensor.dtype}, the engine's is {self._dtype}")
        if checksum(bucket.tensors) != bucket.checksum:
            raise WrongWeights(f"{where}: its bytes are not those that were sent")

    def taken(self, bucket: Bucket) -> None:
        """Note that the engine has the tensors of `bucket`."""
        self._missing -= bucket.tensors.keys()
        self._buckets += 1

    def check_whole(self) -> None:
        """Raise WrongWeights if a declared tensor has not come."""
        if self._missing:
            first, *more = sorted(self._missing)
            others = f" and {len(more)} more" if more else ""
            raise WrongWeights(f"the update to version {self.version} lacks {first}{others}")
