"""InternLM2, whose names of tensors are the canonical ones. transformers has no such model, but its Llama is the same
network with wqkv taken apart.
"""

from roll.families.family import DEFAULTS, Family
from roll.families.llama import LLAMA_TOKENS
from roll.families.tensors import EVERYWHERE, WO_BIAS, WQKV_BIAS

# Defaults: configuration_internlm2.py of internlm/internlm2-7b.
FAMILY = Family(
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    defaults={**DEFAULTS, **LLAMA_TOKENS, "pad_token_id": 0, "bias": True},
    only={"hidden_act": "silu"},
    tensors={name: name for name in (*EVERYWHERE, WQKV_BIAS, WO_BIAS)},
    free_head_dim=False,
    rope_types=("linear", "dynamic"),
    rope_scaling_keys={"rope_type": "type", "factor": "factor"},
    in_transformers="llama",
)
