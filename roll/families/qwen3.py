"""Qwen3: a Llama with norms of queries and keys, and heads of their own size."""

from roll.families.family import DEFAULTS, TINY, Family
from roll.families.llama import LAYER, LLAMA_TENSORS, OUTPUT_BIAS, QKV_BIAS
from roll.families.tensors import in_layers

QK_NORM = in_layers(
    LAYER,
    {"attention.q_norm.weight": "self_attn.q_norm.weight", "attention.k_norm.weight": "self_attn.k_norm.weight"},
)

# Defaults: models/qwen3/configuration_qwen3.py of transformers.
FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    only={"hidden_act": "silu", "use_sliding_window": False},
    keys={"bias": "attention_bias"},
    tensors=LLAMA_TENSORS | QKV_BIAS | OUTPUT_BIAS | QK_NORM,
    qk_norm=True,
    tiny={**TINY, "head_dim": 10},
)
