"""Folders that transformers itself wrote, of random models of every family."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from roll.families import FAMILIES

# Non-square everywhere; two query heads for each key-value head.
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
LENGTHS = (11, 1, 16, 29)
"""Sequences of these many tokens are asked for; the last only where RoPE reaches beyond 16."""


@dataclass(frozen=True)
class Case:
    """One model: its family, and what its config has beside SIZES."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)


def scaled(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, "factor": 2.0, **parameters}}


CASES: dict[str, Case] = {
    name: Case(name, dict(family.only)) for name, family in FAMILIES.items() if family.in_transformers is None
} | {
    "llama-tied": Case("llama", {"tie_word_embeddings": True} | scaled("dynamic")),
    "llama-bias": Case("llama", {"attention_bias": True}),
    "llama-linear": Case("llama", scaled("linear")),
    "llama3": Case(
        "llama",
        {"head_dim": 10}
        | scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "mistral-heads": Case("mistral", {"head_dim": 8, "sliding_window": None}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen3-dynamic": Case("qwen3", {"head_dim": 10} | scaled("dynamic")),
    "qwen3-bias": Case("qwen3", {"head_dim": 6, "attention_bias": True}),
    "qwen3-tied": Case("qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
}


def sequences(case: Case) -> list[Tensor]:
    """Token ids, one tensor `[length]` for each length that the model's context has room for."""
    stretched = case.changes.get("rope_parameters", {}).get("rope_type") in ("linear", "dynamic")
    generator = torch.Generator().manual_seed(3)
    context = 32 if stretched else 16
    return [torch.randint(40, (length,), generator=generator) for length in LENGTHS if length <= context]


def write_with_transformers(folder: Path, case: Case) -> list[Tensor]:
    """Save a model with random numbers everywhere; its logits `[length, V]` of each of `sequences`, one by one."""
    config = AutoConfig.for_model(case.model_type, **SIZES | case.changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
        # Longer ones later: transformers keeps dynamic RoPE's base from the longest sequence so far.
        logits = [model(ids.unsqueeze(0)).logits[0] for ids in sequences(case)]
    model.save_pretrained(folder, max_shard_size="40KB")
    return logits
