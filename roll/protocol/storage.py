"""A batch as bytes: in a pickle, in Ray's object store, in a file.

Tensors are pickled as their bytes. Protocol 5 hands these over without a copy, which Ray makes use of; a slice takes
only its own rows along, not the storage that it is a view of. Every dtype is exact. Values arrive on the CPU, whatever
device they came from: whoever loads them may not have it.
"""

from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path
from struct import Struct
from typing import BinaryIO, TypeVar
from uuid import uuid4

import torch
from torch import Tensor

from roll.config import expand_path
from roll.errors import UserError

T = TypeVar("T")
PackedTensor = tuple[bytes | pickle.PickleBuffer, torch.dtype, tuple[int, ...]]

_HEADER = b"roll.DataProto 2\n"
"""The first line of a file: what it is, and the version of its layout. The pickle and the trailer follow."""
_TRAILER = Struct("<QI")
"""The length of the pickle in bytes, and its CRC-32."""
_READ_BYTES = 1 << 24


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


class _Summed:
    """A file to write to, with the number of bytes written and their checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.length, self.checksum = file, 0, 0

    def write(self, values: bytes | memoryview | pickle.PickleBuffer) -> int:
        view = memoryview(values).cast("B")
        self.length += view.nbytes
        self.checksum = zlib.crc32(view, self.checksum)
        return self._file.write(view)


def save(data: object, path: str | os.PathLike[str]) -> None:
    """Write a batch into one file, which appears whole or not at all, also when the machine goes down."""
    path = expand_path(path)
    unfinished = path.with_name(f"{path.name}.{uuid4().hex}.unfinished")
    try:
        with unfinished.open("xb") as file:
            file.write(_HEADER)
            summed = _Summed(file)
            pickle.dump(data, summed, protocol=5)
            file.write(_TRAILER.pack(summed.length, summed.checksum))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read what `save` wrote, a `kind`. Nothing is unpickled before its checksum is found right.

    Raises ValueError if the file is not one that `save` wrote, or not as it wrote it. What objects of the batch raise
    where they cannot be made, such as ImportError for their class, is raised as it is.
    """
    with expand_path(path).open("rb") as file:
        header = file.read(len(_HEADER))
        if header != _HEADER:
            raise UserError(f"{path} does not begin with {_HEADER!r}, so it is no batch that this version can read")
        length = os.fstat(file.fileno()).st_size - len(_HEADER) - _TRAILER.size
        checksum, left = 0, max(length, 0)
        while left and (part := file.read(min(left, _READ_BYTES))):
            checksum, left = zlib.crc32(part, checksum), left - len(part)
        if length < 0 or file.read() != _TRAILER.pack(length, checksum):
            raise UserError(f"{path} is cut off or damaged")
        file.seek(len(_HEADER))
        data = pickle.load(file)
    if not isinstance(data, kind):
        raise UserError(f"{path} holds a {type(data).__name__}, not a batch")
    return data


def _sync_folder(folder: Path) -> None:
    """Make a new name in it last."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
