"""Writes the weights of a Hugging Face folder: safetensors of a limited size, and their index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint.weight_files import INDEX, SINGLE

MAX_SHARD_BYTES = 2 << 30


class ShardWriter:
    """Collects tensors up to a size and writes each collection as one safetensors file.

    `prefix` keeps the files of several writers (one per pipeline stage) apart.
    """

    def __init__(self, folder: Path, prefix: str = "model", max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.prefix, self.max_bytes = folder, prefix, max_bytes
        self.file_of: dict[str, str] = {}
        """Tensor name to the file that holds it, of the files written so far."""
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_bytes:
            self.flush()
        # A copy: parts of one parameter share memory, which safetensors refuses.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes

    def flush(self) -> None:
        """Write what is pending.

        Raises:
            OSError: it cannot be written.
        """
        if not self._pending:
            return
        file_name = f"{self.prefix}-{self._files:05d}.safetensors"
        try:
            save_file(self._pending, self.folder / file_name, metadata={"format": "pt"})
        except SafetensorError as error:  # Of a full disk too, which it tells by number.
            told = re.search(r"os error (\d+)", str(error))
            number = None if told is None else int(told[1])
            reason = str(error) if number is None else os.strerror(number)
            raise OSError(number, reason, str(self.folder / file_name)) from error
        self.file_of |= dict.fromkeys(self._pending, file_name)
        self._pending, self._pending_bytes, self._files = {}, 0, self._files + 1


def write_index(folder: Path, written: Iterable[Mapping[str, str]]) -> None:
    """The index over the files of all writers; a single file needs none and gets the single file's name."""
    parts = list(written)
    file_of = {name: file for part in parts for name, file in part.items()}
    assert len(file_of) == sum(map(len, parts)), "a tensor was written by two writers"
    files = sorted(set(file_of.values()))
    if len(files) == 1:
        os.replace(folder / files[0], folder / SINGLE)
        return
    total = sum(_tensor_bytes(folder / file) for file in files)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2))


def _tensor_bytes(path: Path) -> int:
    """The size of a safetensors file without its header, whose length stands in the first eight bytes."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
