"""RMSNorm for Megatron-Core's layer spec, with sequence parallelism (which Megatron-Core's torch norm refuses)."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean in fp32 (Zhang & Sennrich 2019), as InternLM2 and Llama do it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` to `[..., H]`, in x's dtype."""
        fp32 = x.float()
        normed = fp32 * torch.rsqrt(fp32.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)
