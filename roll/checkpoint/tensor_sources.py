"""Where a model's initial tensors come from: a Hugging Face folder, or a seed.

A folder has `config.json`, the tokenizer's files, and safetensors: either one `model.safetensors` or several files with
`model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roll.config import ModelConfig, expand_path
from roll.models.families import EMBEDDING, OUTPUT, TENSOR_NAMES, family_shapes, join_qkv
from roll.models.hf_layout import hf_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorSource(Protocol):
    """Gives the tensors of one model, or a rank's part of them."""

    def part(self, name: str, dim: int | None, index: int, count: int) -> Tensor:
        """Part `index` of `count` equal parts of the tensor along `dim`; all of it where `dim` is None."""


class HfFolder:
    """The tensors of a Hugging Face folder under canonical names, whatever the model's family calls them.

    Raises:
        ValueError: there are no weights, the index names a file that is not there, or a file is not complete.
    """

    def __init__(self, folder: str | Path, model: ModelConfig) -> None:
        self.folder = folder = expand_path(folder)
        self.model = model
        self.names = TENSOR_NAMES[model.model_type]
        self._file_of: Mapping[str, str]
        index = folder / INDEX
        if index.is_file():
            self._file_of = _read_index(index)
        elif (folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(_header(folder / SINGLE), SINGLE)
        else:
            raise ValueError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}")
        absent = sorted(name for name in set(self._file_of.values()) if not (folder / name).is_file())
        if absent:
            raise ValueError(f"{folder}: {INDEX} names files that are not there: {', '.join(absent)}")

    def check(self, head: str) -> None:
        """Compare names and shapes with the model's.

        A value head that is not there is started anew, and a language model's output is not read for one.

        Raises:
            ValueError: tensors are missing, unknown or of another shape; all of them are listed.
        """
        expected, found = family_shapes(self.model, head), self.shapes()
        (output,), (embedding,) = self.names.of(OUTPUT), self.names.of(EMBEDDING)
        optional = {"v_head.weight", output} if head == "value" else {"v_head.weight"}
        unknown = sorted(name for name in found.keys() - expected.keys() - optional if not self.names.is_computed(name))
        problems = [f"missing: {name}" for name in sorted(expected.keys() - found.keys() - optional)]
        # A tied output beside its embedding might be another tensor, and then one of the two would be lost.
        tied = {output: f", which tie_word_embeddings makes {embedding}"} if self.model.tie_word_embeddings else {}
        problems += [f"unknown: {name}{tied.get(name, '')}" for name in unknown]
        problems += [
            f"shape: {name} is {found[name]}, the config asks for {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        if problems:
            raise ValueError(f"{self.folder} does not fit its config.json:\n  " + "\n  ".join(problems))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The family's name and the shape of every tensor, from the files' headers."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file_name in sorted(set(self._file_of.values())):
            header = _header(self.folder / file_name)
            shapes |= {name: shape for name, shape in header.items() if self._file_of.get(name) == file_name}
        return shapes

    def part(self, name: str, dim: int | None, index: int, count: int) -> Tensor:
        own = self.names.of(EMBEDDING if name == OUTPUT and self.model.tie_word_embeddings else name)
        if len(own) == 1:
            return self._part(own[0], dim, index, count)
        # Rows of wqkv that are whole key-value heads come from as many rows of q, k and v; columns are columns there.
        if dim != 0 or self.model.num_key_value_heads % count == 0:
            return join_qkv(self.model, *(self._part(x, dim, index, count) for x in own))
        whole = join_qkv(self.model, *(self._part(x, None, 0, 1) for x in own))
        return whole.chunk(count)[index]

    def _part(self, name: str, dim: int | None, index: int, count: int) -> Tensor:
        if name not in self._file_of:
            assert name == "v_head.weight", name  # `check` has refused everything else.
            return torch.zeros(())
        with safe_open(self.folder / self._file_of[name], framework="pt") as file:
            whole = file.get_slice(name)
            if dim is None:
                return whole[:]
            size = whole.get_shape()[dim] // count
            rows = slice(index * size, (index + 1) * size)
            return whole[rows] if dim == 0 else whole[:, rows]


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to the file that holds it."""
    try:
        file_of: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is not a complete index: {error!r}") from error
    return file_of


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error


class RandomTensors:
    """Fresh weights: normal with the config's `initializer_range`, norms one, biases and the value head zero.

    Each tensor is drawn whole from a generator of its own, seeded by `seed` and its name, so that a model starts the
    same under every parallel mode.
    """

    def __init__(self, model: ModelConfig, head: str, seed: int) -> None:
        self.shapes = hf_shapes(model, head)
        self.tied = model.tie_word_embeddings
        self.std = model.initializer_range
        self.seed = seed

    def part(self, name: str, dim: int | None, index: int, count: int) -> Tensor:
        whole = self._whole(EMBEDDING if self.tied and name == OUTPUT else name)
        return whole if dim is None else whole.chunk(count, dim=dim)[index]

    def _whole(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith(".bias") or name == "v_head.weight":
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        return torch.normal(0.0, self.std, shape, generator=generator)


def tensor_source(folder: str | Path, model: ModelConfig, *, init: str, head: str, seed: int) -> TensorSource:
    """The weights in `folder` for `init` load, checked against the model; fresh ones from `seed` for random."""
    if init == "random":
        return RandomTensors(model, head, seed)
    source = HfFolder(folder, model)
    source.check(head)
    return source
