"""The shapes of a model's tensors in the Hugging Face layout, under canonical names (`roll.families.tensors`)."""

from __future__ import annotations

from roll.config import ModelConfig


def hf_shapes(model: ModelConfig, head: str) -> dict[str, tuple[int, ...]]:
    """The canonical name and shape of every tensor of the whole model. A tied output counts as a tensor of its own."""
    hidden, ffn = model.hidden_size, model.intermediate_size
    qkv = model.query_key_value_size
    shapes: dict[str, tuple[int, ...]] = {"model.tok_embeddings.weight": (model.vocab_size, hidden)}
    for n in range(model.num_hidden_layers):
        layer = f"model.layers.{n}."
        shapes |= {
            layer + "attention_norm.weight": (hidden,),
            layer + "attention.wqkv.weight": (qkv, hidden),
        }
        if model.qkv_bias:
            shapes[layer + "attention.wqkv.bias"] = (qkv,)
        if model.qk_norm:
            shapes |= {layer + f"attention.{norm}.weight": (model.head_dim,) for norm in ("q_norm", "k_norm")}
        shapes[layer + "attention.wo.weight"] = hidden, model.num_attention_heads * model.head_dim
        if model.bias:
            shapes[layer + "attention.wo.bias"] = (hidden,)
        shapes |= {
            layer + "ffn_norm.weight": (hidden,),
            layer + "feed_forward.w1.weight": (ffn, hidden),
            layer + "feed_forward.w3.weight": (ffn, hidden),
            layer + "feed_forward.w2.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    shapes |= {"v_head.weight": (1, hidden)} if head == "value" else {"output.weight": (model.vocab_size, hidden)}
    return shapes
