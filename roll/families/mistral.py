"""Mistral without a sliding window."""

from roll.families.family import DEFAULTS, Family
from roll.families.llama import LLAMA_TENSORS, LLAMA_TOKENS

# Defaults: models/mistral/configuration_mistral.py of transformers. A file that leaves the window out means one.
FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={**DEFAULTS, **LLAMA_TOKENS, "num_key_value_heads": 8, "sliding_window": 4096},
    only={"hidden_act": "silu", "sliding_window": None},
    keys={"bias": None},
    tensors=LLAMA_TENSORS,
)
