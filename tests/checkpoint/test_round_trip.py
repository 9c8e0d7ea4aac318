"""Folders of every family through every mode and back, compared file by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.checkpoint.hf import load_weights, save_hf
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ModelConfig, ParallelSettings, StrategySettings
from roll.families.tensors import EMBEDDING, OUTPUT
from roll.models.family_tensors import to_family
from roll.models.gpt import build_model
from roll.parallel.state import parallel_groups
from roll.strategies.hf import HfStrategy
from tests.checkpoint.folder_of_tensors import assert_same_bytes, random_tensors, read_folder, write_folder
from tests.families import NAMES, family_setting, tiny
from tests.rank_pool import RankPool

MODES: list[dict[str, Any]] = [
    {"mode": "mtp", "pp": 2},
    {"mode": "msp", "tp": 2},
    {"mode": "fsp", "tp": 2},
    {"mode": "isp", "sp": 2, "wp": 2},
]
BESIDE = {
    "README.md": "# A model",
    "LICENSE": "free",
    "configuration_own.py": "class OwnConfig: ...\n",
    "modeling_own.py": "class OwnModel: ...\n",
    "tokenization_own.py": "class OwnTokenizer: ...\n",
    "generation_config.json": '{"eos_token_id": [2,  5]}',
    "chat_template.jinja": "{{ messages }}\n",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "added_tokens.json": "{}",
    "tokenizer.model": "\x00\n",
    "vocab.json": "{ }",
    "merges.txt": "#version\r\na b",
}
KEYS = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}, "pad_token_id": -1, "my_own": {"key": [None, 1]}}
CASES = [(family, tie) for family in NAMES for tie in ("untied", "tied", "tied, with an output")]


def model_of(family: str, tied: bool) -> ModelConfig:
    return tiny(family, num_hidden_layers=2, tie_word_embeddings=tied)


def make(folder: Path, family: str, tie: str) -> dict[str, Tensor]:
    """A folder as people publish it, and the tensors that it must have afterwards."""
    model = model_of(family, tie != "untied")
    tensors = {name: x.contiguous() for name, x in to_family(model, random_tensors(model, "lm").items())}
    (embedding,), (output,) = (model.family.names.of(name) for name in (EMBEDDING, OUTPUT))
    held = tensors | ({output: tensors[embedding].clone()} if "output" in tie else {})
    write_folder(folder, model, held, files=2)
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
    config = json.loads((folder / "config.json").read_text()) | KEYS
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return tensors


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but the weights."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "safetensors" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_came_back(before: dict[str, bytes], tensors: dict[str, Tensor], folder: Path, *, without: set[str]) -> None:
    after = snapshot(folder)
    assert after.keys() == before.keys() - without
    config = json.loads(before["config.json"]) | {"dtype": "float32", "torch_dtype": "float32"}
    assert json.loads(after["config.json"]) == config
    assert {name: text for name, text in after.items() if name != "config.json"} == {
        name: before[name] for name in after if name != "config.json"
    }
    assert_same_bytes(read_folder(folder), tensors)


def through_the_model(jobs: list[tuple[Path, list[Path], str | None]], layout: dict[str, Any]) -> None:
    parallel = ParallelSettings(**layout)
    with parallel_groups(parallel) as state:
        for source, targets, family in jobs:
            model = ModelConfig.from_folder(source, family)
            gpt = build_model(model, parallel, state, dtype=torch.float32, head="lm")
            load_weights(gpt, tensor_source(source, model, init="load", head="lm", seed=0), state)
            for target in targets:
                save_hf(target, gpt, model, state, dtype=torch.float32, source=source)


def every_mode(root: Path) -> None:
    """Elsewhere and over itself, in every mode. One job: starting ranks takes longer than all of this."""
    for layout in MODES:
        jobs = [
            (folder := root / layout["mode"] / f"{n}", [Path(f"{folder}-again"), folder], family_setting(family))
            for n, (family, _) in enumerate(CASES)
        ]
        through_the_model(jobs, layout)


def test_every_family_comes_back_from_every_mode(ranks: RankPool, tmp_path: Path) -> None:
    """Elsewhere all but the README comes along; over the folder itself everything is kept."""
    expected = {}
    for layout in MODES:
        for number, case in enumerate(CASES):
            source = tmp_path / layout["mode"] / f"{number}"
            tensors = make(source, *case)
            expected[source] = (snapshot(source), tensors)
    ranks.run(every_mode, tmp_path, world_size=2)
    for source, (before, tensors) in expected.items():
        assert_came_back(before, tensors, Path(f"{source}-again"), without={"README.md"})
        assert_came_back(before, tensors, source, without=set())


@pytest.mark.parametrize(("family", "tie"), CASES)
def test_the_strategy_of_transformers_does_the_same(tmp_path: Path, family: str, tie: str) -> None:
    source = tmp_path / "source"
    tensors = make(source, family, tie)
    before = snapshot(source)
    strategy = HfStrategy(StrategySettings(name="hf", model_path=source, family=family_setting(family)))
    strategy.initialize()
    for target, without in ((tmp_path / "again", {"README.md"}), (source, set[str]())):
        strategy.save_hf(target)
        assert_came_back(before, tensors, target, without=without)
    with pytest.raises(ValueError, match="inside of"):
        strategy.save_hf(tmp_path)
