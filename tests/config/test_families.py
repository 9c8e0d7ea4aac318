"""What config.json of each family means, what is refused, and that what is written is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from roll.config import ConfigError, ModelConfig, RopeScaling
from roll.families import FAMILIES, find_family
from tests.families import LISTED, NAMES, family_setting

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
IN_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.in_transformers is None]


def read(folder: Path, content: dict[str, Any], family: str | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelConfig.from_folder(folder, family)


def llama(**changes: Any) -> dict[str, Any]:
    return SIZES | {"model_type": "llama"} | changes


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_absent_keys_mean_what_transformers_means(tmp_path: Path, family: str) -> None:
    theirs = AutoConfig.for_model(family)
    needed = FAMILIES[family].only  # The default of Mistral's `sliding_window` is one, which is not supported.
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {"num_attention_heads": 32}
    sizes |= {"hidden_size": 32 * 6}
    ours = read(tmp_path, sizes | {"model_type": family, **needed})
    same = ("rms_norm_eps", "initializer_range", "tie_word_embeddings", "num_key_value_heads")
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    for key in same + tokens:
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.rope_theta == theirs.default_theta
    # Those whose default follows from the sizes have it filled in.
    assert ours.head_dim == getattr(type(theirs)(**sizes), "head_dim", 6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_what_is_written_is_read_back(tmp_path: Path, family: str, tied: bool) -> None:
    declared = find_family(family)
    scaling = LLAMA3 if "llama3" in declared.rope_types else {"rope_type": "dynamic", "factor": 2.0}
    changes: dict[str, Any] = {"eos_token_id": (2, 7), "rope_theta": 5e5, "tie_word_embeddings": tied}
    if declared.free_head_dim:
        changes["head_dim"] = 10
    model = ModelConfig(model_type=family, rope_scaling=RopeScaling(**scaling), **SIZES | changes)
    content = model.to_hf_dict()
    assert read(tmp_path, content, family_setting(family)) == model
    assert (content["architectures"], content["model_type"]) == ([declared.architecture], declared.model_type)
    if family == "internlm2":  # Its config class accepts these two keys and no other.
        assert content["rope_scaling"] == {"type": "dynamic", "factor": 2.0}
    if family not in IN_TRANSFORMERS:
        return
    theirs = AutoConfig.for_model(**json.loads(json.dumps(content)))
    assert theirs.rope_parameters == {"rope_theta": 5e5, **LLAMA3}
    assert (theirs.head_dim, theirs.eos_token_id, theirs.tie_word_embeddings) == (10, [2, 7], tied)
    theirs.save_pretrained(tmp_path)  # in the words of transformers 5
    assert ModelConfig.from_folder(tmp_path) == model


def test_biases_and_norms_are_the_familys() -> None:
    nothing = (False, False, False)
    for family, expected in {
        "internlm2": nothing,
        "llama": nothing,
        "mistral": nothing,
        "qwen2": (True, False, False),
        "qwen3": (False, False, True),
    }.items():
        model = ModelConfig(model_type=family, **SIZES)
        assert (model.qkv_bias, model.bias, model.qk_norm) == expected, family


@pytest.mark.parametrize(
    ("family", "said", "bias", "qkv_bias"),
    [
        ("internlm2", {}, True, True),  # as configuration_internlm2.py has it
        ("internlm2", {"bias": True}, True, True),
        ("internlm2", {"bias": None}, False, False),  # torch's layers take a null for no bias
        ("internlm2", {"bias": False, "attention_bias": True}, False, False),  # another family's key says nothing
        ("llama", {}, False, False),
        ("llama", {"attention_bias": True}, True, True),
        ("llama", {"bias": True}, False, False),
        ("qwen3", {"attention_bias": True}, True, True),
        ("qwen2", {"attention_bias": True, "bias": True}, False, True),
        ("mistral", {"attention_bias": True, "sliding_window": None}, False, False),
    ],
)
def test_biases_are_what_the_familys_key_says(
    tmp_path: Path, family: str, said: dict[str, Any], bias: bool, qkv_bias: bool
) -> None:
    model = read(tmp_path, SIZES | {"model_type": family} | said)
    assert (model.bias, model.qkv_bias) == (bias, qkv_bias)
    content = model.to_hf_dict()
    key = {"internlm2": "bias", "llama": "attention_bias", "qwen3": "attention_bias"}.get(family)
    assert {name: content[name] for name in ("bias", "attention_bias") if name in content} == (
        {key: bias} if key else {}
    )
    assert read(tmp_path, content) == model


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_biases_of_a_family_without_a_key_are_refused(family: str) -> None:
    line = rf"bias: {family} has only false; true is of 'internlm2', 'llama',.* 'qwen3'"
    with pytest.raises(ConfigError, match=line):
        ModelConfig(model_type=family, bias=True, **SIZES)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 64),
        ({"type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "dynamic", "factor": 2}, 128),
        ({"rope_type": "dynamic", "factor": 1.01}, 64),
        (LLAMA3, 64),
        ({"rope_type": "default"}, 64),
    ],
)
def test_context_length(tmp_path: Path, scaling: dict[str, Any] | None, length: int) -> None:
    assert read(tmp_path, llama(rope_scaling=scaling)).context_length == length


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            SIZES | {"model_type": "qwen3_moe", "num_experts": 8},
            f"model_type: only {LISTED} are supported, "
            "got 'qwen3_moe', a mixture of experts; the setting `family` names one of your own, as module:Name",
        ),
        (llama(num_local_experts=8), "num_local_experts: mixtures of experts are not supported, got 8"),
        (llama(attention_bias=2), "attention_bias: must be a valid boolean, got 2"),
        (SIZES | {"model_type": "internlm2", "bias": "yes"}, "bias: must be a valid boolean, got 'yes'"),
        (llama(mlp_bias=True), "mlp_bias: only false is supported, got true"),
        (llama(model_type="mistral", sliding_window=16), "sliding_window: only null is supported, got 16"),
        (
            llama(model_type="mistral"),
            "sliding_window: only null is supported, got no value, which means 4096",
        ),
        (llama(model_type="qwen2", use_sliding_window=True), "use_sliding_window: only false is supported, got true"),
        (
            llama(model_type="qwen2", layer_types=["full_attention", "sliding_attention"]),
            "layer_types: only 'full_attention' is supported, got 'sliding_attention'",
        ),
        (
            llama(architectures=["LlamaForSequenceClassification"]),
            "architectures: only 'LlamaForCausalLM' is supported, got [\"LlamaForSequenceClassification\"]",
        ),
        (
            llama(quantization_config={"quant_method": "gptq"}),
            'quantization_config: only null is supported, got {"quant_method": "gptq"}',
        ),
        (
            llama(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
            "rope_parameters.rope_type: llama has only 'default', 'linear', 'dynamic' and 'llama3' here, got 'yarn'",
        ),
        (
            SIZES | {"model_type": "internlm2", "bias": False, "rope_scaling": LLAMA3},
            "rope_scaling.rope_type: internlm2 has only 'default', 'linear' and 'dynamic' here, got 'llama3'",
        ),
        (
            llama(rope_scaling={"type": "longrope", "short_factor": [1.0]}),
            "rope_scaling.type: llama has only 'default', 'linear', 'dynamic' and 'llama3' here, got 'longrope'",
        ),
        (
            llama(rope_scaling={"type": "linear", "factor": 2.0, "attention_factor": 0.5}),
            "rope_scaling.attention_factor: is not supported with rope type 'linear', got 0.5",
        ),
        (
            llama(rope_parameters={"full_attention": {"rope_type": "default"}}),
            "rope_parameters: must hold for all layers alike, got one for each of 'full_attention'",
        ),
        (llama(rope_scaling="linear"), 'rope_scaling: must be a JSON object, got "linear"'),
        (
            llama(rope_parameters={"type": "dynamic", "factor": 0.5}),
            "rope_parameters.factor: must be greater than or equal to 1, got 0.5",
        ),
        (
            llama(rope_scaling={key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}),
            "rope_scaling.low_freq_factor: rope_type 'llama3' needs it, but it is not given",
        ),
        (
            llama(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}),
            "rope_scaling.low_freq_factor: 4.0 must be below high_freq_factor 4.0",
        ),
        (
            llama(rope_scaling={"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}),
            "rope_scaling.low_freq_factor: belongs to rope_type 'llama3', got 1.0 with 'linear'",
        ),
        (llama(partial_rotary_factor=0.5), "partial_rotary_factor: only 1.0 is supported, got 0.5"),
        (llama(head_dim=5), "head_dim: 5 is odd; rotary embeddings turn pairs"),
        (
            SIZES | {"model_type": "internlm2", "bias": False, "head_dim": 8},
            "head_dim: internlm2 has hidden_size 48 / num_attention_heads 8 = 6, got 8",
        ),
        (llama(eos_token_id=[2, 40]), "eos_token_id: 40 is not below vocab_size 40"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, content: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    assert str(caught.value).splitlines() == [f"{tmp_path / 'config.json'}: {line}"]


def test_rope_of_another_family_is_refused_in_settings_too() -> None:
    message = "rope_scaling.rope_type: internlm2 has only 'linear', 'dynamic' here, got 'llama3'"
    with pytest.raises(ConfigError, match=message):
        ModelConfig(rope_scaling=RopeScaling(**LLAMA3), **SIZES)
