"""Causal attention over runs of a flat batch, on one rank, without communication.

Legend: Q flat queries, K flat keys, h query heads, g key-value heads, d head size; in a run m queries and l keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from roll.parallel.sequence.segments import Runs

# Queries that share one mask: what a masked run needs beside its keys stays below this many rows.
BLOCK = 1024


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of its attention."""

    scale: float | None = None
    """Of the scores; None for 1/sqrt(d)."""
    window: int | None = None
    """Keys that a query sees, itself among them; None for all before it."""
    softcap: float | None = None
    """Scores x become softcap * tanh(x / softcap)."""
    dropout: float = 0.0


Kernel = Callable[[Tensor, Tensor, Tensor, Runs, AttentionOptions], Tensor]
"""q `[Q, h, d]`, k and v `[K, g, d]` to `[Q, h, d]`, zero for queries that are in no run."""


def torch_attention(q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions) -> Tensor:
    """torch's own scaled dot product attention: runs of equal shape at once, each only over its own keys."""
    outputs, order = [], []
    for queries, keys, flat_queries, flat_keys in runs.by_shape:
        q_run, k_run, v_run = (
            x.index_select(0, index).unflatten(0, (-1, size)).transpose(1, 2)
            for x, index, size in ((q, flat_queries, queries), (k, flat_keys, keys), (v, flat_keys, keys))
        )
        outputs.append(_causal(q_run, k_run, v_run, options).transpose(1, 2).flatten(0, 1))
        order.append(flat_queries)
    joined = torch.cat([_nothing(q, k, v), *outputs])
    return torch.zeros_like(q).index_copy(0, torch.cat([torch.arange(0, device=q.device), *order]), joined)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions) -> Tensor:
    """flash-attn's kernel for runs of any lengths, in one call."""
    from flash_attn import flash_attn_varlen_func

    query_bounds, key_bounds, flat_queries, flat_keys = runs.joined
    if not runs.runs:
        return torch.zeros_like(q).index_copy(0, flat_queries, _nothing(q, k, v))
    context = flash_attn_varlen_func(
        q.index_select(0, flat_queries),
        k.index_select(0, flat_keys),
        v.index_select(0, flat_keys),
        cu_seqlens_q=query_bounds,
        cu_seqlens_k=key_bounds,
        max_seqlen_q=max(run.queries for run in runs.runs),
        max_seqlen_k=max(run.keys for run in runs.runs),
        dropout_p=options.dropout,
        softmax_scale=options.scale,
        causal=True,  # aligned at the last query and key, as runs are
        window_size=(-1, -1) if options.window is None else (options.window - 1, 0),
        softcap=options.softcap or 0.0,
    )
    return torch.zeros_like(q).index_copy(0, flat_queries, context)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[0, h, d]` that comes from all three: a rank without a real token takes part in its peers' backward."""
    return q[:0] + k[:0].sum() + v[:0].sum()


def kernel_for(implementation: str) -> Kernel:
    """flash-attn's for a model that was loaded with it, torch's for every other."""
    wants_flash = implementation.startswith("flash_attention")
    return flash_attention if wants_flash and find_spec("flash_attn") is not None else torch_attention


def _causal(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """q `[r, h, m, d]`, k and v `[r, g, l, d]`, the last query at the last key."""
    queries, keys = q.shape[2], k.shape[2]
    sees_all = options.window is None or options.window >= keys
    if queries == keys and sees_all and options.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.scale, dropout_p=options.dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
    # Masks with grouped heads take torch's slowest path, so heads are repeated here.
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    blocks = []
    for begin in range(0, queries, BLOCK):
        block = q[:, :, begin : begin + BLOCK]
        at = torch.arange(begin, begin + block.shape[2], device=q.device).unsqueeze(1) + keys - queries
        first = 0 if options.window is None else max(0, begin + keys - queries - options.window + 1)
        last = begin + keys - queries + block.shape[2]
        seen = torch.arange(first, last, device=q.device)
        mask = seen <= at
        if options.window is not None:
            mask &= seen > at - options.window
        blocks.append(_masked(block, k[:, :, first:last], v[:, :, first:last], mask, options))
    return torch.cat(blocks, dim=2)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    if options.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale, dropout_p=options.dropout)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = options.softcap * torch.tanh(q @ k.transpose(2, 3) * scale / options.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, options.dropout) @ v
