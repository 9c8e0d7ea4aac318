"""A batch as bytes: in a pickle, in Ray's object store, in a file.

Tensors are pickled as their bytes. Protocol 5 hands these over without a copy, which Ray makes use of; a slice takes
only its own rows along, not the storage that it is a view of. Every dtype is exact. Values arrive on the CPU, whatever
device they came from: whoever loads them may not have it.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from roll.protocol.batch_data import BatchData

PackedTensor = tuple[bytes | pickle.PickleBuffer, torch.dtype, tuple[int, ...]]

_HEADER = b"roll.DataProto 1\n"
"""The first line of a file: what it is, and the version of its layout."""


def packed(tensor: Tensor, protocol: int) -> PackedTensor:
    """The bytes of a tensor, its dtype and its shape; detached.

    Under pickle protocol 5 the bytes are not copied, if the tensor is contiguous and on the CPU.
    """
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
    return pickle.PickleBuffer(flat.data) if protocol >= 5 else flat.tobytes(), tensor.dtype, tuple(tensor.shape)


def unpacked(
    values: bytes | bytearray | memoryview | pickle.PickleBuffer, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """The tensor again. It may be written to: bytes that are read-only, as shared memory is, are copied."""
    view = memoryview(values)
    if not view.nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).view(shape)


def save(data: BatchData, path: str | os.PathLike[str]) -> None:
    """Write a batch into one file, which appears whole or not at all."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(_HEADER)
            pickle.dump(data, file, protocol=5)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` wrote.

    Raises ValueError if the file is not one that `save` wrote, or not all of it.
    """
    with Path(path).open("rb") as file:
        header = file.read(len(_HEADER))
        if header != _HEADER:
            raise ValueError(f"{path} does not begin with {_HEADER!r}, so it is no batch that this version can read")
        try:
            return pickle.load(file)
        except (EOFError, pickle.UnpicklingError) as broken:
            raise ValueError(f"{path} is cut off or damaged: {broken}") from broken
