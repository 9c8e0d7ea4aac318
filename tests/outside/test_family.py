"""A family of a user's own: how settings name it, how its config.json is read, and what is said where it is wrong.

That it loads, runs, trains and saves as one process does is tested with all other families (`tests.families`).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from roll.config import ConfigError, ModelConfig, ModelSource, SFTConfig, StrategySettings, load_config
from roll.data.tokenizer import build_char_tokenizer
from roll.errors import UserError
from roll.families import FAMILIES, Family, find_family
from roll.families.registry import SHARED, stand_in
from roll.families.tensors import EMBEDDING, QK_NORMS, WO_BIAS, WQKV, WQKV_BIAS
from roll.pipelines.end_tokens import end_token_ids
from roll.pipelines.rl_config import RLConfig
from roll.strategies import HfStrategy
from tests.families import OUTSIDE
from tests.outside.boxes import BOXES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIG: dict[str, Any] = {
    "model_type": "boxes",
    "architectures": ["BoxesForCausalLM"],
    "activation": "swiglu",
    "vocab_size": 40,
    "d_model": 48,
    "d_ff": 80,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 64,
    "norm_eps": "1e-6",
    "rotary_scaling": {"rope_type": "linear", "factor": 2.0},
    "share_embedding": True,
    "attn_bias": True,
    "hidden_size": 7,  # keys of other families, which say nothing
    "attention_bias": False,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return path


def test_its_keys_are_read_and_written(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(folder_of(tmp_path), OUTSIDE)
    assert [getattr(model, name) for name in SIZES] == [48, 80, 2, 8, 4]
    assert (model.rms_norm_eps, model.rope_theta, model.context_length) == (1e-6, 1e4, 128)
    assert (model.tie_word_embeddings, model.bias, model.qkv_bias, model.head_dim) == (True, True, True, 6)
    assert (model.family, model.model_type) == (BOXES, OUTSIDE)
    written = model.to_hf_dict()
    told = {key: value for key, value in CONFIG.items() if key not in ("hidden_size", "attention_bias")}
    assert {key: written[key] for key in told} == told | {"norm_eps": 1e-6}
    assert not written.keys() & {"hidden_size", "bias", "attention_bias", "rope_theta", "rope_scaling"}
    assert ModelConfig.model_validate_json(model.model_dump_json()) == model


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"n_head": 5}, "n_head: 5 does not divide hidden_size 48"),
        ({"rotary_base": -1.0}, "rotary_base: must be greater than 0, got -1.0"),
        ({"activation": "gelu"}, 'activation: only "swiglu" is supported, got "gelu"'),
        ({"rotary_scaling": {"type": "yarn"}}, "rotary_scaling.type: boxes has only .* here, got 'yarn'"),
        ({"rotary_scaling": {"type": "linear", "factor": 0.5}}, "rotary_scaling.factor: must be greater than or equal"),
        ({"model_type": "llama"}, f"model_type: family '{OUTSIDE}' has 'boxes', got 'llama'"),
    ],
)
def test_a_problem_has_the_name_that_the_file_has(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {line}"):
        ModelConfig.from_folder(folder_of(tmp_path, **changes), OUTSIDE)


def test_the_setting_is_told_where_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got 'boxes'; the setting `family` names one of your own, as module:Name$"):
        ModelConfig.from_folder(folder_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", r"must be 'internlm2', .* \(did you mean 'llama'\?\), or module:Name of a family of your own"),
        ("gpt", r"must be 'internlm2', .*'qwen3', or module:Name of a family of your own"),
        ("no.such_module:A", "cannot import module 'no.such_module'"),
        ("tests.outside.boxes:BOX", "has no Family 'BOX'; near names: BOXES"),
        ("tests.outside.boxes:NOT_A_FAMILY", "is a str, not a roll.families.Family"),
        ("tests.outside.boxes:", "must be 'module:Family'"),
    ],
)
def test_a_name_of_no_family(tmp_path: Path, name: str, message: str) -> None:
    for make, setting in (
        (lambda: StrategySettings(name="hf", model_path=tmp_path, family=name), "family"),
        (lambda: ModelSource(path=tmp_path, family=name), "family"),
        (lambda: ModelConfig(**FAMILIES["llama"].tiny, model_type=name), "model_type"),
    ):
        with pytest.raises(ConfigError, match=rf"^{setting}: .*{message}") as refused:
            make()
        assert str(refused.value).endswith(f", got {name!r}")


def test_the_settings_of_runs_hand_it_on(tmp_path: Path) -> None:
    """To every strategy of a run that starts from a folder, or from the final model of a warm start."""
    folder = folder_of(tmp_path / "model", vocab_size=96)
    sft = ["model.config=null", f"model.path={folder}", "alphabet=null", "seq_len=32"]
    with pytest.raises(ConfigError, match=r"model\.path: .*got 'boxes'; the setting `family`"):
        load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml", sft)
    config = load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml", [*sft, f"model.family={OUTSIDE}"])
    assert config.model.architecture.family is BOXES
    assert config.strategy_settings(folder).family == OUTSIDE

    ppo, roles = EXAMPLES / "ppo_cpu.yaml", ("actor", "critic", "reference")
    one = load_config(RLConfig, ppo, ["warm_start=null", f"model_path={folder}", f"family={OUTSIDE}"])
    assert one.architecture.family is BOXES
    assert {one.strategy_settings(role, folder).family for role in roles} == {OUTSIDE}
    started = load_config(RLConfig, ppo, [f"warm_start.model.config.model_type={OUTSIDE}"])
    assert started.architecture.family is BOXES
    assert {started.strategy_settings(role, folder).family for role in roles} == {OUTSIDE}
    assert {load_config(RLConfig, ppo).strategy_settings(role, folder).family for role in roles} == {None}
    for changes, line in (
        ([f"family={OUTSIDE}"], "family: must be null with a warm_start, got .*; warm_start.model.family is its own"),
        ([f"warm_start.model.family={OUTSIDE}"], r"warm_start\.model\.family: must be null where there is no path"),
    ):
        with pytest.raises(ConfigError, match=f"(?m)^{line}"):
            load_config(RLConfig, ppo, changes)


def test_its_key_of_end_tokens_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", vocab_size=96, stop_ids=[5, -1, 7], eos_token_id=9)
    changes = ["warm_start=null", f"model_path={folder}", f"family={OUTSIDE}"]
    config = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", changes)
    assert config.architecture.eos_token_id == (5, 7)
    assert end_token_ids(config, build_char_tokenizer()) == (2, 5, 7)  # 2 is the tokenizer's


def test_a_model_from_random_weights_is_written_under_its_names(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    strategy = HfStrategy(StrategySettings(name="hf", model_path=folder, family=OUTSIDE, init="random"))
    strategy.initialize()
    strategy.save_hf(tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    layer = [
        f"transformer.h.1.attn.0.{part}.{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")
    ]
    assert {*layer, "transformer.wte.weight", "transformer.h.0.mlp.up.weight", "transformer.norm.weight"} <= names
    assert "unembed.weight" not in names  # tied
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "boxes"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors": {**BOXES.tensors, "model.extra": "x"}}, "tensors have 'model.extra', which is no canonical name"),
        ({"tensors": {WQKV: BOXES.tensors[WQKV]}}, f"tensors lack '{EMBEDDING}'; .*tensors lack 'output.weight'"),
        ({"tensors": {**BOXES.tensors, EMBEDDING: ("q", "k", "v")}}, f"tensors have 3 names of '{EMBEDDING}'"),
        ({"tensors": {**BOXES.tensors, WO_BIAS: "bias"}}, "a layer's number {n} belongs in both or in none"),
        ({"qk_norm": True}, f"tensors lack '{QK_NORMS[0]}', which qk_norm asks for"),
        ({"keys": {"bias": None}}, f"tensors have '{WQKV_BIAS}', which belongs to qkv_bias or a key for bias"),
    ],
)
def test_a_declaration_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^family 'boxes': .*{message}"):
        replace(BOXES, **changes)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "internlm2"])
def test_another_network_does_not_stand_in(name: str) -> None:
    other: Family = replace(BOXES, in_transformers=name)
    with pytest.raises(UserError, match=f"family 'boxes': in_transformers {name!r} is not the same network"):
        stand_in(other)


def test_each_file_of_the_package_is_a_family() -> None:
    folder = Path(__file__).resolve().parents[2] / "roll" / "families"
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", *SHARED}
    assert files == set(FAMILIES)
    assert all(find_family(name).model_type == name for name in files)
    assert {*re.findall(r"\w+", "internlm2 llama mistral qwen2 qwen3")} <= files
