"""Hugging Face folders: files of a limited size, their index, and a folder that appears only when it is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.checkpoint.folders import Kind, begin_folder, finish_folder
from roll.checkpoint.hf_writer import ShardWriter, write_index
from roll.checkpoint.tensor_sources import HfFolder
from tests.checkpoint.folder_of_tensors import INDEX, MODEL, assert_same_bytes, read_folder


def write(folder: Path, tensors: dict[str, Tensor], max_bytes: int, prefix: str = "model") -> dict[str, str]:
    writer = ShardWriter(folder, prefix, max_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.flush()
    return writer.file_of


def test_files_by_size(tmp_path: Path) -> None:
    # 40 + 40 bytes fit 100, the third does not; 120 bytes are a file of their own; 60 + 40 fit exactly.
    sizes = {"a": 10, "b": 10, "c": 10, "d": 30, "e": 15, "f": 10}
    tensors = {name: torch.full((size,), float(size)) for name, size in sizes.items()}
    file_of = write(tmp_path, tensors, max_bytes=100)
    numbers = {name: int(file.removesuffix(".safetensors").removeprefix("model-")) for name, file in file_of.items()}
    assert numbers == {"a": 0, "b": 0, "c": 1, "d": 2, "e": 3, "f": 3}
    write_index(tmp_path, [file_of])
    assert_same_bytes(read_folder(tmp_path), tensors)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == file_of
    assert index["metadata"] == {"total_size": 4 * sum(sizes.values())}  # Of the tensors, not of the files.


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4)}
    write_index(tmp_path, [{}, write(tmp_path, tensors, max_bytes=1000)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same_bytes(read_folder(tmp_path), tensors)


def test_files_of_several_writers_stay_apart(tmp_path: Path) -> None:
    first, second = {"a": torch.zeros(4), "b": torch.ones(4)}, {"c": torch.full((4,), 2.0)}
    written = [write(tmp_path, first, 16, "model-stage00"), {}, write(tmp_path, second, 16, "model-stage01")]
    write_index(tmp_path, written)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert_same_bytes(read_folder(tmp_path), first | second)


def test_a_tensor_has_one_writer(tmp_path: Path) -> None:
    written = [write(tmp_path, {"a": torch.zeros(4)}, 16, f"model-stage0{stage}") for stage in (0, 1)]
    with pytest.raises(AssertionError, match="a tensor was written by two writers"):
        write_index(tmp_path, written)


def test_bytes_are_kept(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {
        "not a number": torch.tensor([float("nan"), float("-inf"), -0.0, 1e-45]),
        "bfloat16": torch.randn(5).bfloat16(),
        "above": whole[:2],
        "below": whole[2:],  # the other half of the same memory
        "transposed": whole.T,
        "empty": torch.zeros(0, 3),
    }
    file_of = write(tmp_path, tensors, max_bytes=64)
    write_index(tmp_path, [file_of])
    assert_same_bytes(read_folder(tmp_path), tensors)
    assert HfFolder(tmp_path, MODEL).shapes()["transposed"] == (6, 4)


def test_what_was_added_is_written_whatever_happens_to_it_later(tmp_path: Path) -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    writer = ShardWriter(tmp_path)
    writer.add("a", tensor)
    with torch.no_grad():
        tensor.zero_()
    writer.flush()
    write_index(tmp_path, [writer.file_of])
    assert read_folder(tmp_path)["a"].tolist() == [1, 1, 1]


def test_file_of_speaks_of_what_is_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_bytes=8)
    writer.add("a", torch.zeros(2))
    assert writer.file_of == {}
    writer.add("b", torch.zeros(2))
    assert list(writer.file_of) == ["a"]
    writer.flush()
    writer.flush()  # nothing is pending: no file
    assert list(writer.file_of) == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_appears_when_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "deeper" / "weights"
    unfinished = begin_folder(folder, Kind.CHECKPOINT)
    (unfinished / "file").write_text("new")
    assert not folder.exists()
    finish_folder(unfinished, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["weights"]
    assert (folder / "file").read_text() == "new"


def test_an_older_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "common.pt").write_text("old")
    unfinished = begin_folder(folder, Kind.CHECKPOINT)
    (unfinished / "state.pt").write_text("new")
    assert [path.name for path in folder.iterdir()] == ["common.pt"]
    finish_folder(unfinished, folder)
    assert [path.name for path in folder.iterdir()] == ["state.pt"]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_what_an_interrupted_writer_left_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    (begin_folder(folder, Kind.CHECKPOINT) / "half").write_text("left behind")
    assert (tmp_path / "weights.unfinished" / "half").exists()
    unfinished = begin_folder(folder, Kind.CHECKPOINT)
    assert list(unfinished.iterdir()) == []
    finish_folder(unfinished, folder)
    assert list(folder.iterdir()) == []


def test_a_failing_finish_leaves_the_older_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "common.pt").write_text("old")
    unfinished = begin_folder(folder, Kind.CHECKPOINT)

    def refuse(*paths: object) -> None:
        raise OSError("the disk says no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="the disk says no"):
        finish_folder(unfinished, folder)
    assert (folder / "common.pt").read_text() == "old"


def test_a_finish_that_fails_half_way_puts_the_older_folder_back(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "common.pt").write_text("old")
    begin_folder(folder, Kind.CHECKPOINT).rmdir()
    with pytest.raises(FileNotFoundError, match=r"weights\.unfinished"):
        finish_folder(folder.with_name("weights.unfinished"), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert (folder / "common.pt").read_text() == "old"
