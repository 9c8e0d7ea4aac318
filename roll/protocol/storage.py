"""A batch as bytes: in a pickle, in Ray's object store, in a file.

Tensors are pickled as NumPy arrays of their bytes. Protocol 5 hands these over without a copy, which Ray makes use of,
and a slice takes only its own rows along, not the storage that it is a view of. Every dtype is exact. Values arrive on
the CPU, whatever device they came from: whoever loads them may not have it.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from roll.protocol.batch_data import BatchData

PackedTensor = tuple[np.ndarray, torch.dtype, tuple[int, ...]]

_HEADER = b"roll.DataProto 1\n"
"""The first line of a file: what it is, and the version of its layout."""


def packed(tensor: Tensor) -> PackedTensor:
    """The bytes of a tensor (no copy, if it is contiguous and on the CPU), its dtype and its shape; detached."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def unpacked(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor again. It may be written to: bytes that are shared with other processes are copied."""
    own = array if array.flags.writeable else array.copy()
    return torch.from_numpy(own).view(dtype).view(shape)


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
