"""ModelConfig: what config.json may say, and which degrees a model can be split by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config import ConfigError, ModelConfig, ParallelSettings, check_parallel
from tests.families import LISTED

SIZES: dict[str, Any] = {
    "vocab_size": 92544,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
# As internlm2-7b publishes it, without RoPE scaling.
HF = SIZES | {
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "internlm2",
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.0",
    "use_cache": True,
    "attn_implementation": "eager",
}


OWN_TYPES = "; the setting `family` names one of your own, as module:Name"
KNOWN_TYPES = f"model_type: only {LISTED} are supported"


def write(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in HF.items() if key not in keys}


def test_from_folder_ignores_bookkeeping(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(write(tmp_path, HF))
    assert model == ModelConfig(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    assert model.head_dim == 128
    assert not model.bias


def test_hf_dict_reads_back(tmp_path: Path) -> None:
    model = ModelConfig(**SIZES, rope_theta=5e5, initializer_range=0.01, rms_norm_eps=1e-6, eos_token_id=7)
    content = model.to_hf_dict()
    assert content["architectures"] == ["InternLM2ForCausalLM"]
    assert content["model_type"] == "internlm2"
    assert ModelConfig.from_folder(write(tmp_path, content)) == model


def test_absent_keys_mean_what_hugging_face_means(tmp_path: Path) -> None:
    brief = without("rms_norm_eps", "rope_theta", "pad_token_id", "tie_word_embeddings", "num_key_value_heads", "bias")
    model = ModelConfig.from_folder(write(tmp_path, brief))
    assert (model.rms_norm_eps, model.rope_theta, model.pad_token_id) == (1e-6, 10000, 0)
    assert model.num_key_value_heads == 32
    assert model.bias


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    assert ModelConfig.from_folder(write(tmp_path, without("rope_theta") | {"rope_parameters": rope})).rope_theta == 5e5


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (HF | {"model_type": "gpt2", "bias": True}, f"{KNOWN_TYPES}, got 'gpt2'{OWN_TYPES}"),
        (without("model_type"), f"{KNOWN_TYPES}, got None{OWN_TYPES}"),
        (HF | {"hidden_act": "gelu"}, 'hidden_act: only "silu" is supported, got "gelu"'),
        (without("hidden_size"), "hidden_size: this setting is required, but not given"),
        (HF | {"num_attention_heads": 33}, "num_attention_heads: 33 does not divide hidden_size 4096"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path: Path, content: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_folder(write(tmp_path, content))
    assert str(caught.value).splitlines()[0] == f"{tmp_path / 'config.json'}: {line}"


def test_all_problems_of_a_file_at_once(tmp_path: Path) -> None:
    content = HF | {"bias": 1, "hidden_act": "gelu", "vocab_size": 0, "num_key_value_heads": 5}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_folder(write(tmp_path, content))
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'config.json'}: {line}"
        for line in [
            'hidden_act: only "silu" is supported, got "gelu"',
            "vocab_size: must be greater than 0, got 0",
            "bias: must be a valid boolean, got 1",
            "num_key_value_heads: 5 does not divide num_attention_heads 32",
        ]
    ]


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: there is no such model folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"{tmp_path}: the model folder has no config.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config.json: is not JSON"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ConfigError, match="must hold a JSON object, got list"):
        ModelConfig.from_folder(write(tmp_path, []))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 48}, "num_attention_heads: 48 does not divide hidden_size 4096"),
        ({"hidden_size": 96}, "num_attention_heads: hidden_size 96 / num_attention_heads 32 = 3 is odd"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide num_attention_heads 32"),
        ({"eos_token_id": 92544}, "eos_token_id: 92544 is not below vocab_size 92544"),
    ],
)
def test_sizes_agree(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**SIZES | change)


def test_check_parallel() -> None:
    model = ModelConfig(**SIZES)
    assert check_parallel(model, ParallelSettings(tp=8, pp=4), 64, "actor") == []
    assert check_parallel(model, ParallelSettings(tp=64, pp=5, cp=2), 100, "actor") == [
        "actor.parallel.tp: 64 does not divide the model's num_attention_heads 32; 8 would fit",
        "actor.parallel.tp: 64 does not divide the model's num_key_value_heads 8; 8 would fit",
        "actor.parallel.pp: 5 does not divide the model's num_hidden_layers 32; 4 would fit",
        "actor.world_size: 100 is not a multiple of parallel.tp 64 x pp 5 x cp 2 = 640",
    ]
    assert check_parallel(model, ParallelSettings(tp=2), 3) == [
        "world_size: 3 is not a multiple of parallel.tp 2 x pp 1 x cp 1 = 2"
    ]
