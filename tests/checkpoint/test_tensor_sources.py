"""Where a model's tensors come from: folders that fit and folders that do not, slices, and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.checkpoint.tensor_sources import HfFolder, RandomTensors, tensor_source
from roll.models.hf_layout import hf_shapes
from tests.checkpoint.folder_of_tensors import INDEX, MODEL, random_tensors, write_folder

FIRST_W2 = "model.layers.0.feed_forward.w2.weight"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return random_tensors(MODEL, "lm")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no weights: none of model\.safetensors, model\.safetensors\.index"):
        HfFolder(tmp_path, MODEL)


def test_files_that_the_index_names_must_be_there(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = write_folder(tmp_path, MODEL, tensors, files=3)
    for number in (0, 2):
        (folder / f"part-{number}.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names files that are not there: part-0.safetensors, part-2.safetensors"):
        HfFolder(folder, MODEL)


@pytest.mark.parametrize("files", [1, 3])
def test_half_a_file_is_refused(tmp_path: Path, tensors: dict[str, Tensor], files: int) -> None:
    folder = write_folder(tmp_path, MODEL, tensors, files=files)
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{last} is not a complete safetensors file"):
        HfFolder(folder, MODEL).check("lm")


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    del tensors["output.weight"], tensors["model.layers.1.ffn_norm.weight"]
    tensors["model.layers.2.ffn_norm.weight"] = torch.ones(8)
    tensors["extra"] = torch.ones(1)
    tensors[FIRST_W2] = tensors[FIRST_W2].T.contiguous()
    tensors["model.norm.weight"] = torch.ones(8, 1)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as refused:
        HfFolder(write_folder(tmp_path, MODEL, tensors, files=2), MODEL).check("lm")
    assert str(refused.value).splitlines()[1:] == [
        "  missing: model.layers.1.ffn_norm.weight",
        "  missing: output.weight",
        "  unknown: extra",
        "  unknown: model.layers.2.ffn_norm.weight",
        f"  shape: {FIRST_W2} is (20, 8), the config asks for (8, 20)",
        "  shape: model.norm.weight is (8, 1), the config asks for (8,)",
    ]


def test_an_index_that_leaves_a_tensor_out_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    # The file holds it, but nobody would find it there.
    folder = write_folder(tmp_path, MODEL, tensors, files=2)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"missing: model.norm.weight"):
        HfFolder(folder, MODEL).check("lm")


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    folder = write_folder(tmp_path, MODEL, tensors, files=2)
    index = json.loads((folder / INDEX).read_text())
    held = index["weight_map"]["model.norm.weight"]
    index["weight_map"]["model.norm.weight"] = {"part-0": "part-1", "part-1": "part-0"}[held[:6]] + ".safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"missing: model.norm.weight"):
        HfFolder(folder, MODEL).check("lm")


@pytest.mark.parametrize("held", ["lm", "value"])
@pytest.mark.parametrize("wanted", ["lm", "value"])
def test_heads_that_are_there_and_wanted(tmp_path: Path, held: str, wanted: str) -> None:
    source = HfFolder(write_folder(tmp_path, MODEL, random_tensors(MODEL, held)), MODEL)
    if (held, wanted) == ("value", "lm"):
        with pytest.raises(ValueError, match=r"missing: output\.weight"):
            source.check(wanted)
    else:
        source.check(wanted)


def test_a_value_head_of_another_width_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(MODEL, "value") | {"v_head.weight": torch.zeros(1, 9)}
    with pytest.raises(ValueError, match=r"v_head.weight is \(1, 9\), the config asks for \(1, 8\)"):
        HfFolder(write_folder(tmp_path, MODEL, tensors), MODEL).check("value")


def test_a_value_head_that_is_not_there_is_zero(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    source = HfFolder(write_folder(tmp_path, MODEL, tensors), MODEL)
    parameter = torch.ones(1, 8)
    parameter.copy_(source.part("v_head.weight", None, 0, 1))
    assert parameter.tolist() == [[0.0] * 8]


@pytest.mark.parametrize("files", [1, 3])
def test_parts_are_chunks(tmp_path: Path, tensors: dict[str, Tensor], files: int) -> None:
    source = HfFolder(write_folder(tmp_path, MODEL, tensors, files), MODEL)
    source.check("lm")
    assert source.shapes() == hf_shapes(MODEL, "lm")
    for name, tensor in tensors.items():
        assert torch.equal(source.part(name, None, 0, 2), tensor)
        for dim in range(tensor.ndim):
            for count in (1, 2, 4):
                parts = [source.part(name, dim, index, count) for index in range(count)]
                chunks = tensor.chunk(count, dim=dim)
                assert all(torch.equal(part, chunk) for part, chunk in zip(parts, chunks, strict=True)), (name, dim)


def test_a_part_by_hand(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors[FIRST_W2] = torch.arange(160.0).view(8, 20)
    source = HfFolder(write_folder(tmp_path, MODEL, tensors), MODEL)
    assert source.part(FIRST_W2, 0, 1, 4)[:, 0].tolist() == [40, 60]  # rows 2 and 3
    assert source.part(FIRST_W2, 1, 3, 4)[0].tolist() == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_random_tensors_do_not_depend_on_the_split(head: str) -> None:
    source = RandomTensors(MODEL, head, seed=3)
    for name, shape in hf_shapes(MODEL, head).items():
        whole = source.part(name, None, 0, 4)
        assert tuple(whole.shape) == shape
        for dim in (0, 1) if len(shape) == 2 and name != "v_head.weight" else ():
            for count in (2, 4):
                parts = [source.part(name, dim, index, count) for index in range(count)]
                assert torch.equal(torch.cat(parts, dim=dim), whole), (name, dim, count)


def test_random_tensors_by_name_and_seed() -> None:
    first, same, other = (RandomTensors(MODEL, "value", seed) for seed in (3, 3, 4))
    torch.rand(1)  # The process's own generator has no say.
    ones, zero = torch.ones(8), torch.zeros(1, 8)
    assert torch.equal(first.part("model.norm.weight", None, 0, 1), ones)
    assert torch.equal(first.part("v_head.weight", None, 0, 1), zero)
    w1, w3 = (f"model.layers.0.feed_forward.{w}.weight" for w in ("w1", "w3"))
    drawn = first.part(w1, None, 0, 1)
    assert torch.equal(same.part(w1, None, 0, 1), drawn)
    for unlike in (other.part(w1, None, 0, 1), first.part(w3, None, 0, 1)):
        assert not torch.equal(unlike, drawn)


def test_random_tensors_have_the_configs_spread() -> None:
    model = MODEL.model_copy(update={"vocab_size": 4000})
    drawn = RandomTensors(model, "lm", seed=0).part("output.weight", None, 0, 1)
    # 32,000 numbers: the standard error of their mean is 0.0017, that of their deviation 0.0012.
    assert abs(float(drawn.mean())) < 0.01
    assert abs(float(drawn.std()) - 0.3) < 0.01


def test_the_source_that_settings_ask_for(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert isinstance(tensor_source(tmp_path, MODEL, init="random", head="lm", seed=1), RandomTensors)
    with pytest.raises(ValueError, match="holds no weights"):
        tensor_source(tmp_path, MODEL, init="load", head="lm", seed=1)
    write_folder(tmp_path, MODEL, tensors)
    assert isinstance(tensor_source(tmp_path, MODEL, init="load", head="lm", seed=1), HfFolder)
    with pytest.raises(ValueError, match=r"does not fit its config\.json"):
        tensor_source(tmp_path, MODEL.model_copy(update={"num_hidden_layers": 3}), init="load", head="lm", seed=1)
