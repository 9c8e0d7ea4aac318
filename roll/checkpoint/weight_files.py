"""The weight files of a Hugging Face folder: one or several, safetensors or the `pytorch_model.bin` of older models.

Parts of tensors are read, not whole files. A .bin is a pickle, which torch reads with `weights_only`: no code is run.
Those that torch wrote before version 1.6 cannot be mapped into memory; they are read whole, one at a time.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roll.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OLD_SINGLE = "pytorch_model.bin"
OLD_INDEX = "pytorch_model.bin.index.json"
BY_PREFERENCE = (SINGLE, INDEX, OLD_SINGLE, OLD_INDEX)
"""As transformers looks for them: where a folder has several, the first counts."""


class WeightFiles:
    """The tensors of a folder, under the names that its files have.

    Raises:
        ValueError: there are no weights, the index names a file that is not there, or a file is not complete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = next((name for name in BY_PREFERENCE if (folder / name).is_file()), None)
        if found is None:
            raise UserError(f"{folder} holds no weights: none of {', '.join(BY_PREFERENCE)}")
        self._loaded: tuple[str, dict[str, Tensor]] = ("", {})
        self._file_of: Mapping[str, str]
        if found in (SINGLE, OLD_SINGLE):
            self._file_of = dict.fromkeys(self._header(found), found)
            return
        self._file_of = read_index(folder / found)
        absent = sorted(name for name in set(self._file_of.values()) if not (folder / name).is_file())
        if absent:
            raise UserError(f"{folder}: {found} names files that are not there: {', '.join(absent)}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._file_of.values())):
            shapes |= {name: shape for name, shape in self._header(file).items() if self._file_of.get(name) == file}
        return shapes

    def names(self) -> tuple[str, ...]:
        """The name of every tensor, by the index where there is one."""
        return tuple(self._file_of)

    def read(self, name: str, dim: int | None, start: int = 0, stop: int | None = None) -> Tensor:
        """The numbers from `start` to `stop` of dimension `dim`, 0 or 1; the whole tensor where `dim` is None."""
        file, wanted = self._file_of[name], slice(start, stop)
        if _is_safetensors(file):
            with safe_open(self.folder / file, framework="pt") as opened:
                whole = opened.get_slice(name)
                return whole[:] if dim is None else whole[wanted] if dim == 0 else whole[:, wanted]
        tensor = self._unpickled(file)[name]
        return tensor if dim is None else tensor[wanted] if dim == 0 else tensor[:, wanted]

    def _header(self, file: str) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of one file."""
        if not _is_safetensors(file):
            return {name: tuple(tensor.shape) for name, tensor in self._unpickled(file).items()}
        try:
            with safe_open(self.folder / file, framework="pt") as opened:
                names = opened.keys()
                return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise UserError(f"{self.folder / file} is not a complete safetensors file: {error}") from error

    def _unpickled(self, file: str) -> dict[str, Tensor]:
        """The tensors of a .bin file. The latest is kept, because neighbours of a model are asked for in turn."""
        if self._loaded[0] == file:
            return self._loaded[1]
        path = self.folder / file
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (UnpicklingError, RuntimeError, EOFError) as error:
            way_out = "save the model as safetensors where it can be read"
            raise UserError(f"{path} is not a complete file of tensors alone ({way_out}): {error}") from error
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise UserError(f"{path} must hold tensors by their names, and nothing else")
        self._loaded = (file, content)
        return content


def _is_safetensors(file: str) -> bool:
    return file.endswith(".safetensors")


def indexed_files(index: Path) -> frozenset[str]:
    """The files that an index names; none without an index."""
    return frozenset(read_index(index).values()) if index.is_file() else frozenset()


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to the file that holds it."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:  # Not JSON, no such key, or no object.
        raise UserError(f"{path} is not a complete index: {error!r}") from error
