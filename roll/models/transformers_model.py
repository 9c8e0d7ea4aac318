"""InternLM2 as transformers' Llama: the same network with wqkv taken apart.

transformers has no InternLM2 of its own. This gives generation with transformers' own model, and an independent
implementation to compare ours with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from roll.config import ModelConfig

LLAMA_NAMES: dict[str, str] = {
    "model.tok_embeddings.weight": "model.embed_tokens.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "model.norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "v_head.weight": "v_head.weight",  # Ours: transformers' Llama has no value head.
}
INTERNLM2_NAMES = {llama: internlm2 for internlm2, llama in LLAMA_NAMES.items()}


def llama_config(model: ModelConfig, dtype: torch.dtype = torch.float32) -> LlamaConfig:
    """The Llama config that describes the same network."""
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        bos_token_id=model.bos_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
        tie_word_embeddings=False,
        dtype=dtype,
    )


def llama_tensors(model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """InternLM2's (name, tensor) pairs under Llama's names, wqkv split into q, k and v."""
    for name, tensor in tensors:
        if not name.endswith("attention.wqkv.weight"):
            yield _renamed(name, LLAMA_NAMES), tensor
            continue
        layer = name.removesuffix("attention.wqkv.weight")
        groups = tensor.view(model.num_key_value_heads, -1, model.head_dim, model.hidden_size)
        for projection, rows in (("q", groups[:, :-2]), ("k", groups[:, -2]), ("v", groups[:, -1])):
            yield f"{layer}self_attn.{projection}_proj.weight", rows.reshape(-1, model.hidden_size)


def internlm2_tensors(model: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The other way: Llama's tensors (or their gradients) under InternLM2's names, q, k and v joined to wqkv."""
    for name, tensor in tensors.items():
        layer, is_query, _ = name.partition("self_attn.q_proj.weight")
        if is_query:
            q, k, v = (
                tensors[f"{layer}self_attn.{projection}_proj.weight"].view(
                    model.num_key_value_heads, -1, model.head_dim, model.hidden_size
                )
                for projection in "qkv"
            )
            yield f"{layer}attention.wqkv.weight", torch.cat([q, k, v], dim=1).reshape(-1, model.hidden_size)
        elif "self_attn.k_proj" not in name and "self_attn.v_proj" not in name:
            yield _renamed(name, INTERNLM2_NAMES), tensor


def _renamed(name: str, names: Mapping[str, str]) -> str:
    if name in names:
        return names[name]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer is None or layer[2] not in names:
        raise ValueError(f"{name}: the model has no such tensor")
    return f"model.layers.{layer[1]}.{names[layer[2]]}"


def build_llama(model: ModelConfig, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama of this shape with unset weights; fill it with `load_llama_tensors`."""
    llama = LlamaForCausalLM(llama_config(model, dtype))
    return llama.to(dtype).eval()


def load_llama_tensors(llama: LlamaForCausalLM, model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy InternLM2 tensors into the Llama; returns the Llama names that were filled.

    Raises:
        ValueError: a tensor has no place or another shape than the model.
    """
    parameters = dict(llama.named_parameters())
    filled = set()
    for name, tensor in llama_tensors(model, tensors):
        if name not in parameters or parameters[name].shape != tensor.shape:
            wanted = tuple(parameters[name].shape) if name in parameters else "no such tensor"
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, the model has {wanted}")
        with torch.no_grad():
            parameters[name].copy_(tensor)
        filled.add(name)
    return filled
