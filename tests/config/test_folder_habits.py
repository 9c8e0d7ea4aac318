"""Habits of config.json files in the wild: read as their own libraries read them, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config import ConfigError, ModelConfig
from roll.families import find_family
from tests.families import NAMES, family_setting

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 384,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def read(folder: Path, family: str, **content: Any) -> ModelConfig:
    """What is read from a config.json with `content` under the family's keys, and the values that it must have."""
    declared = find_family(family)
    own = {declared.key(name): value for name, value in content.items() if value != "absent"}
    whole = {"model_type": declared.model_type, **declared.only} | own
    (folder / "config.json").write_text(json.dumps(whole))
    return ModelConfig.from_folder(folder, family_setting(family))


@pytest.mark.parametrize("family", NAMES)
def test_a_token_id_of_minus_one_is_none(tmp_path: Path, family: str) -> None:
    """Llama's first folders have `pad_token_id: -1`."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(read(tmp_path, family, **SIZES, **{name: -1}), name) is None
        assert getattr(read(tmp_path, family, **SIZES, **{name: None}), name) is None
        assert getattr(read(tmp_path, family, **SIZES, **{name: 3}), name) == 3
        key = find_family(family).key(name)
        with pytest.raises(ConfigError, match=rf"config\.json: {key}: 40 is not below vocab_size 40$"):
            read(tmp_path, family, **SIZES, **{name: 40})
    with pytest.raises(ConfigError, match=r"config\.json: pad_token_id: must be greater than or equal to 0, got -2$"):
        read(tmp_path, family, **SIZES, pad_token_id=-2)


@pytest.mark.parametrize(
    ("given", "read_as"), [([2, 7], (2, 7)), ([2], (2,)), ([-1], None), ([2, -1, 7], (2, 7)), ([], None), (7, 7)]
)
def test_end_tokens(tmp_path: Path, given: Any, read_as: Any) -> None:
    assert read(tmp_path, "llama", **SIZES, eos_token_id=given).eos_token_id == read_as


@pytest.mark.parametrize(
    ("family", "absent", "null"),
    [("internlm2", 32, 32), ("llama", 32, 32), ("mistral", 8, 32), ("qwen2", 32, 32), ("qwen3", 32, 32)],
)
def test_key_value_heads_that_are_not_named(tmp_path: Path, family: str, absent: int, null: int) -> None:
    """Defaults of `configuration_NAME.py`: 8 for Mistral, 32 for Qwen; elsewhere, and for null, the query heads."""
    assert read(tmp_path, family, **SIZES | {"num_key_value_heads": "absent"}).num_key_value_heads == absent
    assert read(tmp_path, family, **SIZES | {"num_key_value_heads": None}).num_key_value_heads == null
    few = SIZES | {"num_attention_heads": 16, "num_key_value_heads": None}
    assert read(tmp_path, family, **few).num_key_value_heads == 16


@pytest.mark.parametrize(
    ("family", "absent"), [("internlm2", 12), ("llama", 12), ("mistral", 12), ("qwen2", 12), ("qwen3", 128)]
)
def test_a_head_size_that_is_not_named(tmp_path: Path, family: str, absent: int) -> None:
    assert read(tmp_path, family, **SIZES).head_dim == absent
    assert read(tmp_path, family, **SIZES, head_dim=None).head_dim == 384 // 32


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    ("content", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 500000}, 5e5),
        ({"rope_theta": "5e5"}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {}}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": None}}, 5e5),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5e5, "factor": None}}, 5e5),
        ({"rope_theta": None}, 1e4),
        ({}, 1e4),
    ],
)
def test_the_base_of_rope(tmp_path: Path, family: str, content: dict[str, Any], theta: float) -> None:
    model = read(tmp_path, family, **SIZES, **content)
    assert (model.rope_theta, model.rope_scaling) == (theta, None)


def test_numbers_that_are_written_as_text(tmp_path: Path) -> None:
    model = read(tmp_path, "llama", **SIZES, rms_norm_eps="1e-06", initializer_range="0.01")
    assert (model.rms_norm_eps, model.initializer_range) == (1e-6, 0.01)
    model = read(tmp_path, "llama", **SIZES, rope_scaling={"type": "linear", "factor": "2.0"})
    assert model.rope_scaling is not None and model.rope_scaling.factor == 2.0
    for text, message in (("tiny", "must be a valid number, got 'tiny'"), ("nan", "must be a finite number, got nan")):
        with pytest.raises(ConfigError, match=rf"rms_norm_eps: {message}$"):
            read(tmp_path, "llama", **SIZES, rms_norm_eps=text)
    with pytest.raises(ConfigError, match=r"hidden_size: must be a valid integer, got '384'$"):
        read(tmp_path, "llama", **SIZES | {"hidden_size": "384"})


@pytest.mark.parametrize("family", NAMES)
def test_a_null_says_no_more_than_a_missing_key(tmp_path: Path, family: str) -> None:
    nulls = dict.fromkeys(("rms_norm_eps", "initializer_range", "tie_word_embeddings", "rope_theta", "architectures"))
    assert read(tmp_path, family, **SIZES, **nulls) == read(tmp_path, family, **SIZES)
    for key, only in find_family(family).only.items():
        if only is False:
            assert read(tmp_path, family, **SIZES, **{key: None}) == read(tmp_path, family, **SIZES)
    key = find_family(family).key("hidden_size")
    with pytest.raises(ConfigError, match=rf"{key}: this setting is required, but not given$"):
        read(tmp_path, family, **SIZES | {"hidden_size": None})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_not_used(tmp_path: Path, family: str) -> None:
    unused = {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 1}
    assert read(tmp_path, family, **SIZES, **unused) == read(tmp_path, family, **SIZES)
    with pytest.raises(ConfigError, match="use_sliding_window: only false is supported, got true"):
        read(tmp_path, family, **SIZES, **unused | {"use_sliding_window": True})


@pytest.mark.parametrize("family", NAMES)
def test_bookkeeping_is_not_read(tmp_path: Path, family: str) -> None:
    kept = {
        "torch_dtype": "float16",
        "dtype": "bfloat16",
        "auto_map": {"AutoModel": "x.Y"},
        "use_cache": None,
        "my": [1],
    }
    assert read(tmp_path, family, **SIZES, **kept) == read(tmp_path, family, **SIZES)
