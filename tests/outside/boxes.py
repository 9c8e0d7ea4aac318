"""A family as a user would bring one: a Llama with other keys in config.json and other names of tensors."""

from roll.families import Family
from roll.families.tensors import EMBEDDING, OUTPUT, WQKV, in_layers

BOXES = Family(
    model_type="boxes",
    architecture="BoxesForCausalLM",
    defaults={"rotary_base": 10000.0, "norm_eps": 1e-5, "n_kv_head": 4},
    only={"activation": "swiglu"},
    keys={
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rotary_base",
        "rope_scaling": "rotary_scaling",
        "tie_word_embeddings": "share_embedding",
        "bias": "attn_bias",
        "eos_token_id": "stop_ids",
    },
    tensors={
        EMBEDDING: "transformer.wte.weight",
        **in_layers(
            "transformer.h.{n}.",
            {
                "attention_norm.weight": "norm_1.weight",
                "attention.wqkv.weight": ("attn.0.query.weight", "attn.0.key.weight", "attn.0.value.weight"),
                "attention.wqkv.bias": ("attn.0.query.bias", "attn.0.key.bias", "attn.0.value.bias"),
                "attention.wo.weight": "attn.1.weight",
                "attention.wo.bias": "attn.1.bias",
                "ffn_norm.weight": "norm_2.weight",
                "feed_forward.w1.weight": "mlp.gate.weight",
                "feed_forward.w3.weight": "mlp.up.weight",
                "feed_forward.w2.weight": "mlp.down.weight",
            },
        ),
        "model.norm.weight": "transformer.norm.weight",
        OUTPUT: "unembed.weight",
    },
    base_prefix="transformer.",
    in_transformers="llama",
)
NOT_A_FAMILY = WQKV
