"""Small transformers decoders of many families, with weights large enough that attention is far from uniform."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 48

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Family (transformers' model_type) to what differs; the implementation is that of the single-process reference.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0, "reference": "eager"},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 5, "sliding_window_pattern": 2},
    "phi3": {"sliding_window": 20, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"n_embd": 32, "n_head": 8, "n_layer": 2, "n_positions": 128, "dropouts": True},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "starcoder2": {"sliding_window": 5},
}


def make_model(family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A causal language model with random weights, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = SMALL | FAMILIES[family] | settings
    reference = wanted.pop("reference", "sdpa")
    if wanted.pop("dropouts", False):
        wanted |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = AutoConfig.for_model(family, **wanted)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=reference).to(dtype)
    return model


def make_exact(model: nn.Module) -> nn.Module:
    """transformers' RMSNorm rounds to fp32, which hides errors below 1e-7; torch's keeps fp64."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                setattr(module, name, norm)
    return model
