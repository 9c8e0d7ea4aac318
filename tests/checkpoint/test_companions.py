"""What goes along with a model's weights, what stays behind, and what config.json says afterwards."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from roll.checkpoint.companions import announced_companions, companions, refuse_to_delete, write_companions
from roll.config import ModelConfig
from tests.checkpoint.folder_of_tensors import INDEX, MODEL
from tests.log_messages import messages

GOES_ALONG = [
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "chat_templates/rag.jinja",
    "configuration_internlm2.py",
    "generation_config.json",
    "LICENSE",
    "merges.txt",
    "modeling_internlm2.py",
    "Notice.txt",
    "ops/__init__.py",
    "ops/kernels/fused.py",
    "preprocessor_config.json",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "tekken.json",
    "tokenization_internlm2.py",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
]
STAYS = [
    ".gitattributes",
    ".git/config.json",
    "README.md",
    "adapter_config.json",
    "all_results.json",
    "checkpoint-5/model.safetensors",
    "checkpoint-5/tokenizer.json",
    "config.json",
    "consolidated.00.pth",
    "flax_model.msgpack",
    "model-00001-of-00002.safetensors",
    "model.safetensors",
    INDEX,
    "optimizer.pt",
    "ops/__pycache__/fused.pyc",
    "picture.png",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "readme.txt",
    "scripts/train.py",
    "tf_model.h5",
    "token_model.safetensors",
    "tokenizer.safetensors",
    "trainer_state.json",
    "training_args.bin",
]
REPLACED = [
    "flax_model.msgpack",
    "model-00001-of-00002.safetensors",
    "model.safetensors",
    INDEX,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "part-7.bin",
    "tf_model.h5",
]


def fill(folder: Path) -> Path:
    """A folder with a file of every kind, in which its own name stands."""
    for name in [*GOES_ALONG, *STAYS]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for index, file in ((INDEX, "model-00001-of-00002.safetensors"), ("pytorch_model.bin.index.json", "part-7.bin")):
        (folder / index).write_text(json.dumps({"weight_map": {"a": file}}))
    (folder / "part-7.bin").write_text("part-7.bin")
    write_config(folder)
    return folder


def write_config(folder: Path, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = (
        MODEL.to_hf_dict() | {"auto_map": {"AutoConfig": "x.Y"}, "my_key": [1, {"a": None}]} | changes
    )
    (folder / "config.json").write_text(json.dumps(content, indent=7))
    return content


def files(folder: Path) -> list[str]:
    found = folder.rglob("*")
    return sorted(str(path.relative_to(folder)) for path in found if path.is_symlink() or not path.is_dir())


def written(tmp_path: Path, source: Path | None, config: ModelConfig = MODEL, known: Sequence[Path] = ()) -> Path:
    target = tmp_path / "target.unfinished"
    target.mkdir()
    write_companions(target, tmp_path / "target", config, torch.bfloat16, source, known)
    return target


def test_what_goes_along(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    assert sorted(map(str, companions(source))) == sorted(GOES_ALONG)
    target = written(tmp_path, source)
    assert files(target) == sorted([*GOES_ALONG, "config.json"])
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in GOES_ALONG)


def test_links_of_a_download_become_files(tmp_path: Path) -> None:
    """The cache of huggingface_hub holds links to files of other names."""
    blobs, source = fill(tmp_path / "blobs"), tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "modeling_internlm2.py"):
        (source / name).symlink_to(blobs / name)
    target = written(tmp_path, source)
    assert files(target) == ["config.json", "modeling_internlm2.py", "tokenizer.json"]
    assert not any(path.is_symlink() for path in target.iterdir())


def test_a_model_from_no_folder_has_its_config_alone(tmp_path: Path) -> None:
    target = written(tmp_path, None)
    assert files(target) == ["config.json"]
    assert ModelConfig.from_folder(target) == MODEL


def test_a_folder_that_is_gone_is_named_and_the_model_saved(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    with messages("roll.checkpoint.companions") as said:
        logging.getLogger("roll.checkpoint.companions").setLevel(logging.INFO)
        known = announced_companions(source)
        assert announced_companions(source, speaks=False) == known
        logging.getLogger("roll.checkpoint.companions").setLevel(logging.NOTSET)
    everything = ", ".join(sorted(["config.json", *GOES_ALONG]))
    (told,) = said
    assert told.startswith(f"saved models get these files of {source}: config.json, ")
    assert sorted(told.rpartition(": ")[2].split(", ")) == everything.split(", ")
    shutil.rmtree(source)
    with messages("roll.checkpoint.companions") as said:
        target = written(tmp_path, source, known=known)
    names = ", ".join(map(str, sorted(known)))
    place = tmp_path / "target"
    assert said == [f"{place}: saved without files of {source} that cannot be read any more: {names}"]
    assert sorted(names.split(", ")) == everything.split(", ")
    assert files(target) == ["config.json"]
    assert ModelConfig.from_folder(target) == MODEL


def test_a_file_that_cannot_be_read_is_named_and_the_rest_saved(tmp_path: Path) -> None:
    """One file is lost and one comes later; a third is there by its name alone."""
    source = fill(tmp_path / "source")
    known = announced_companions(source)
    (source / "tokenizer.json").unlink()
    (source / "vocab.txt").unlink()
    (source / "vocab.txt").mkdir()
    (source / "later.json").write_text("{}")
    with messages("roll.checkpoint.companions") as said:
        target = written(tmp_path, source, known=known)
    (told,) = said
    assert told.endswith(f"without files of {source} that cannot be read any more: tokenizer.json, vocab.txt")
    assert files(target) == sorted({*GOES_ALONG, "config.json", "later.json"} - {"tokenizer.json", "vocab.txt"})
    assert "auto_map" in (target / "config.json").read_text()


def test_a_file_that_cannot_be_written_is_no_lost_one(tmp_path: Path) -> None:
    source, target = fill(tmp_path / "source"), tmp_path / "target.unfinished"
    (target / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"target\.unfinished/tokenizer\.json"):
        write_companions(target, tmp_path / "target", MODEL, torch.bfloat16, source)


def test_the_config_keeps_every_key(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    content = write_config(source, torch_dtype="float16", transformers_version="4.41.0", eos_token_id=[2, -1])
    target = written(tmp_path, source, ModelConfig.from_folder(source))
    types = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert json.loads((target / "config.json").read_text()) == content | types
    assert list(json.loads((target / "config.json").read_text())) == [*content, "dtype"]  # in their order


@pytest.mark.parametrize("given", ["dtype", "torch_dtype", "neither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_names_of_the_type(tmp_path: Path, given: str, dtype: torch.dtype) -> None:
    source, target = fill(tmp_path / "source"), tmp_path / "target"
    write_config(source, **({} if given == "neither" else {given: "float16"}))
    target.mkdir()
    write_companions(target, tmp_path / "other", MODEL, dtype, source)
    content = json.loads((target / "config.json").read_text())
    assert content["dtype"] == content["torch_dtype"] == str(dtype).removeprefix("torch.")
    llama = {key: value for key, value in content.items() if key != "auto_map"} | {"model_type": "llama"}
    (target / "config.json").write_text(json.dumps(llama))
    assert AutoConfig.from_pretrained(target, trust_remote_code=False).dtype == dtype


def test_a_config_in_which_nothing_changes_is_copied(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    write_config(source, dtype="bfloat16", torch_dtype="bfloat16")
    assert (written(tmp_path, source) / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_the_config_of_another_model_is_not_kept(tmp_path: Path) -> None:
    other = MODEL.model_copy(update={"num_hidden_layers": 3})
    target = written(tmp_path, fill(tmp_path / "source"), other)
    assert ModelConfig.from_folder(target) == other
    assert "my_key" not in json.loads((target / "config.json").read_text())


def test_the_network_without_an_output_has_one_afterwards(tmp_path: Path) -> None:
    source = fill(tmp_path / "source")
    write_config(source, architectures=["InternLM2Model"])
    content = json.loads((written(tmp_path, source) / "config.json").read_text())
    assert (content["architectures"], content["my_key"]) == (["InternLM2ForCausalLM"], [1, {"a": None}])


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_model_over_its_own_folder_loses_its_weights_alone(tmp_path: Path, through_a_link: bool) -> None:
    source = fill(tmp_path / "source")
    (source / "link.txt").symlink_to("../elsewhere.txt")
    (source / "data").symlink_to(tmp_path)  # a link to a folder, not to be walked through
    before = {name: (source / name).read_bytes() for name in files(source) if "link" not in name and name != "data"}
    named = source
    if through_a_link:
        named = tmp_path / "latest"
        named.symlink_to(source)
    target = tmp_path / "source.unfinished"
    target.mkdir()
    write_companions(target, source, MODEL, torch.float32, named)
    assert files(target) == sorted([*(before.keys() - set(REPLACED)), "link.txt", "data"])
    assert all((target / name).read_bytes() == before[name] for name in before.keys() - {*REPLACED, "config.json"})
    assert os.readlink(target / "link.txt") == "../elsewhere.txt"
    assert os.readlink(target / "data") == str(tmp_path)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    source, target = fill(tmp_path / "source"), tmp_path / "source.unfinished"
    target.mkdir()
    (source / "link.txt").symlink_to("../elsewhere.txt")
    write_companions(target, source, MODEL, torch.float32, source)
    assert os.readlink(target / "link.txt") == "../elsewhere.txt"
    assert (target / "README.md").read_text() == "README.md"
    assert (target / "README.md").stat().st_ino != (source / "README.md").stat().st_ino


def test_the_folder_that_a_model_came_from_is_not_deleted(tmp_path: Path) -> None:
    source = fill(tmp_path / "runs" / "first" / "final")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for folder in (tmp_path / "runs" / "first", tmp_path / "runs", tmp_path / "link"):
        with pytest.raises(
            ValueError, match=r"the model came from .*final, inside of .*, which writing it there would"
        ):
            refuse_to_delete(source, folder)
    for folder in (source, source / "deeper", tmp_path / "runs" / "fir", tmp_path / "runs" / "second"):
        refuse_to_delete(source, folder)
    refuse_to_delete(None, tmp_path)
