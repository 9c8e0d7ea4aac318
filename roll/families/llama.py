"""Llama, whose names most other families share."""

from roll.families.family import DEFAULTS, Family
from roll.families.tensors import EMBEDDING, OUTPUT, in_layers

LAYER = "model.layers.{n}."
LLAMA_TENSORS = {
    EMBEDDING: "model.embed_tokens.weight",
    **in_layers(
        LAYER,
        {
            "attention_norm.weight": "input_layernorm.weight",
            "attention.wqkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            "attention.wo.weight": "self_attn.o_proj.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "feed_forward.w1.weight": "mlp.gate_proj.weight",
            "feed_forward.w3.weight": "mlp.up_proj.weight",
            "feed_forward.w2.weight": "mlp.down_proj.weight",
        },
    ),
    "model.norm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
QKV_BIAS = in_layers(
    LAYER, {"attention.wqkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")}
)
OUTPUT_BIAS = in_layers(LAYER, {"attention.wo.bias": "self_attn.o_proj.bias"})
LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

# Defaults: models/llama/configuration_llama.py of transformers.
FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={**DEFAULTS, **LLAMA_TOKENS},
    only={"hidden_act": "silu", "mlp_bias": False},
    keys={"bias": "attention_bias"},
    tensors=LLAMA_TENSORS | QKV_BIAS | OUTPUT_BIAS,
)
