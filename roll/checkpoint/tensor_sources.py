"""Sources of a model's initial tensors: a Hugging Face folder, or a seed.

A folder has `config.json`, the tokenizer's files, and weights (see `roll.checkpoint.weight_files`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from roll.checkpoint.weight_files import WeightFiles
from roll.config import ModelConfig, expand_path
from roll.errors import UserError
from roll.families.tensors import EMBEDDING, OUTPUT, VALUE_HEAD
from roll.models.family_tensors import family_shapes, join_qkv
from roll.models.hf_layout import hf_shapes

COMPARED_ROWS = 4096
"""Rows of a tied output that are compared with the embedding at once: it bounds memory."""


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
        self.family = model.family
        self.names = model.family.names
        self._files = WeightFiles(folder)
        self._stored = {self._full_name(name): name for name in self._files.names()}

    def _full_name(self, name: str) -> str:
        """The family's name of a stored tensor: files that hold a model without its output leave its beginning out."""
        full = self.family.base_prefix + name
        return full if self.names.canonical(full) is not None or self.family.is_computed(full) else name

    def check(self, head: str) -> None:
        """Compare names and shapes with the model's.

        A value head that is not there is started anew, and a language model's output is not read for one.

        Raises:
            ValueError: tensors are missing, unknown or of another shape, or a tied output is not its embedding; all
                of them are listed.
        """
        expected, found = family_shapes(self.model, head), self.shapes()
        (output,), (embedding,) = self.names.of(OUTPUT), self.names.of(EMBEDDING)
        tied = head == "lm" and self.model.tie_word_embeddings
        optional = {VALUE_HEAD, output} if head == "value" or tied else {VALUE_HEAD}
        unknown = sorted(
            name for name in found.keys() - expected.keys() - optional if not self.family.is_computed(name)
        )
        problems = [f"missing: {name}" for name in sorted(expected.keys() - found.keys() - optional)]
        problems += [f"unknown: {name}" for name in unknown]
        if tied:
            expected[output] = expected[embedding]
        problems += [
            f"shape: {name} is {found[name]}, the config asks for {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ]
        if tied and found.get(output) == found.get(embedding) == expected[embedding]:
            problems += self._untied(output, embedding)
        if problems:
            raise UserError(f"{self.folder} does not fit its config.json:\n  " + "\n  ".join(problems))

    def _untied(self, output: str, embedding: str) -> Iterator[str]:
        """A tied output that is another tensor than its embedding: transformers 4 reads the one, 5 the other."""
        rows = self.model.vocab_size
        for start in range(0, rows, COMPARED_ROWS):
            one, other = (self._read(name, 0, start, start + COMPARED_ROWS) for name in (output, embedding))
            if not bool((one == other).all()):
                yield (
                    f"tied: {output} differs from {embedding}, which tie_word_embeddings makes it: remove it from the "
                    "file, or set tie_word_embeddings to false in config.json"
                )
                return

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The family's name and the shape of every tensor, from the files' headers."""
        return {self._full_name(name): shape for name, shape in self._files.shapes().items()}

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
        if name not in self._stored:
            assert name == VALUE_HEAD, name  # `check` has refused everything else.
            return torch.zeros(())
        if dim is None:
            return self._read(name, None)
        size = self._shapes[name][dim] // count
        return self._read(name, dim, index * size, (index + 1) * size)

    def _read(self, name: str, dim: int | None, start: int = 0, stop: int | None = None) -> Tensor:
        return self._files.read(self._stored[name], dim, start, stop)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes()


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
        if name.endswith(".bias") or name == VALUE_HEAD:
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
