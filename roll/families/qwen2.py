"""Qwen2: a Llama whose q, k and v always have biases."""

from roll.families.family import DEFAULTS, Family
from roll.families.llama import LLAMA_TENSORS, QKV_BIAS

# Defaults: models/qwen2/configuration_qwen2.py of transformers.
FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={**DEFAULTS, "num_key_value_heads": 32},
    only={"hidden_act": "silu", "use_sliding_window": False},
    keys={"bias": None},
    tensors=LLAMA_TENSORS | QKV_BIAS,
    qkv_bias=True,
)
