"""The architectures that are InternLM2's network under other names, as their config.json describes them.

What config.json says is here; what the tensors are called is in `roll.models.families`. Defaults are those of the
config classes in transformers (`models/NAME/configuration_NAME.py`), and of `configuration_internlm2.py` of
internlm/internlm2-7b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ModelType = Literal["internlm2", "llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["linear", "dynamic", "llama3"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its names, and what the keys of its config.json mean."""

    model_type: ModelType
    architecture: str
    defaults: Mapping[str, Any]
    """Values of keys that config.json leaves out. Sizes have defaults there too, but a file without them is broken
    rather than brief."""
    only: Mapping[str, Any]
    """Keys that change what the model computes, with the only value that is supported here."""
    bias_key: Literal["bias", "attention_bias"] | None = None
    """Key of config.json for biases of q, k, v and the attention's output (`ModelConfig.bias`); None: no such key."""
    qkv_bias: bool = False
    """Whether q, k and v have biases whatever the config says. No family here has biases outside attention."""
    qk_norm: bool = False
    """Whether each query and key head goes through an RMSNorm before RoPE."""
    free_head_dim: bool = True
    """Whether `head_dim` may differ from hidden_size / num_attention_heads."""
    rope_types: tuple[RopeType, ...] = ("linear", "dynamic", "llama3")
    """Values of rope_scaling's type that its own code knows and this library has, beside `default`."""

    @property
    def base_architecture(self) -> str:
        """The name of the network without an output layer."""
        return self.architecture.removesuffix("ForCausalLM") + "Model"


_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="internlm2",
            architecture="InternLM2ForCausalLM",
            defaults=_DEFAULTS | _LLAMA_TOKENS | {"pad_token_id": 0, "bias": True},
            only={"hidden_act": "silu"},
            bias_key="bias",
            free_head_dim=False,
            rope_types=("linear", "dynamic"),
        ),
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            defaults=_DEFAULTS | _LLAMA_TOKENS,
            only={"hidden_act": "silu", "mlp_bias": False},
            bias_key="attention_bias",
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            defaults=_DEFAULTS | _LLAMA_TOKENS | {"num_key_value_heads": 8, "sliding_window": 4096},
            only={"hidden_act": "silu", "sliding_window": None},
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            defaults=_DEFAULTS | {"num_key_value_heads": 32},
            only={"hidden_act": "silu", "use_sliding_window": False},
            qkv_bias=True,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            defaults=_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
            only={"hidden_act": "silu", "use_sliding_window": False},
            bias_key="attention_bias",
            qk_norm=True,
        ),
    )
}
