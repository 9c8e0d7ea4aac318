"""Weight files of every kind hold the same tensors, and what is no weight file is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from roll.checkpoint.weight_files import INDEX, OLD_INDEX, OLD_SINGLE, SINGLE, WeightFiles

TENSORS = {
    "a.weight": torch.arange(24.0).view(6, 4),
    "b.weight": torch.arange(8.0).view(2, 4).bfloat16(),
    "c.bias": torch.arange(5.0),
}
SECOND = {"c.bias"}


def write(folder: Path, kind: str, tensors: dict[str, Tensor] = TENSORS) -> None:
    halves = [{name: tensors[name] for name in tensors if (name in SECOND) == second} for second in (False, True)]
    match kind:
        case "one safetensors":
            save_file(tensors, folder / SINGLE)
        case "safetensors":
            for number, half in enumerate(halves):
                save_file(half, folder / f"model-{number}.safetensors")
        case "one bin":
            torch.save(tensors, folder / OLD_SINGLE)
        case "one old bin":
            torch.save(tensors, folder / OLD_SINGLE, _use_new_zipfile_serialization=False)
        case "bins":
            for number, half in enumerate(halves):
                torch.save(half, folder / f"pytorch_model-{number}.bin")
    if kind in ("safetensors", "bins"):
        pattern, index = {"safetensors": ("model-{}.safetensors", INDEX), "bins": ("pytorch_model-{}.bin", OLD_INDEX)}[
            kind
        ]
        file_of = {name: pattern.format(int(name in SECOND)) for name in tensors}
        (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


KINDS = ["one safetensors", "safetensors", "one bin", "one old bin", "bins"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tensors_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    files = WeightFiles(tmp_path)
    assert set(files.names()) == TENSORS.keys()
    assert files.shapes() == {"a.weight": (6, 4), "b.weight": (2, 4), "c.bias": (5,)}
    for name in [*TENSORS, *reversed(TENSORS)]:
        found = files.read(name, None)
        assert found.dtype == TENSORS[name].dtype and torch.equal(found, TENSORS[name])
    assert files.read("a.weight", 0, 4, 6).tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert files.read("a.weight", 1, 1, 2).tolist() == [[1], [5], [9], [13], [17], [21]]
    assert files.read("a.weight", 0, 4, 99).shape == (2, 4)
    assert files.read("c.bias", 0, 3, 4).tolist() == [3]


def test_the_first_kind_counts(tmp_path: Path) -> None:
    """In transformers' order, whatever else is there: the others may be older."""
    for number, kind in enumerate(reversed(["one safetensors", "safetensors", "one bin", "bins"])):
        write(tmp_path, kind, {name: tensor + number for name, tensor in TENSORS.items()})
        assert WeightFiles(tmp_path).read("c.bias", None)[0] == number


class Harmful:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_is_run(tmp_path: Path) -> None:
    for legacy in (False, True):
        torch.save({"a": Harmful(tmp_path / "ran")}, tmp_path / OLD_SINGLE, _use_new_zipfile_serialization=legacy)
        with pytest.raises(
            ValueError, match=rf"{OLD_SINGLE} is not a complete file of tensors alone \(save the model as"
        ):
            WeightFiles(tmp_path)
    (tmp_path / OLD_SINGLE).write_bytes(pickle.dumps({"a": Harmful(tmp_path / "ran")}))
    with pytest.raises(ValueError, match="is not a complete file of tensors alone"):
        WeightFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["one bin", "one old bin", "bins"])
def test_half_a_bin_is_refused(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    last = sorted(tmp_path.glob("*.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-40])
    with pytest.raises(ValueError, match=rf"{last.name} is not a complete file"):
        WeightFiles(tmp_path).shapes()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"step": 3, "a": torch.ones(1)}, {"model": {"a": torch.ones(1)}}])
def test_a_bin_of_something_else_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / OLD_SINGLE)
    with pytest.raises(ValueError, match=rf"{OLD_SINGLE} must hold tensors by their names, and nothing else"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": null}', "3"])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"{INDEX} is not a complete index"):
        WeightFiles(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"holds no weights: none of model\.safetensors, .*, pytorch_model\.bin\.index\.json$"
    ):
        WeightFiles(tmp_path)
    write(tmp_path, "bins")
    (tmp_path / "pytorch_model-1.bin").unlink()
    with pytest.raises(ValueError, match=rf"{OLD_INDEX} names files that are not there: pytorch_model-1\.bin"):
        WeightFiles(tmp_path)
