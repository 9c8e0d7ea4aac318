"""Causal attention within the segments of a packed row: the core attention of our layer spec.

Legend: b rows of s tokens (one packed row, or several of equal length), Tq queries and Tk keys of all segments, h query
heads and g kv heads of this rank, d head size.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from roll.models.packed_sequence import PackedSequence
from roll.models.segments import Segments

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


class PackedCausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v with the causal mask, each token within its own segment."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.softmax_scale = softmax_scale
        self.join_heads = nn.Flatten(start_dim=2)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequence,
        **unused: object,
    ) -> Tensor:
        """q `[s, b, h, d]`, k and v `[s, b, g, d]` to the context `[s, b, h*d]`."""
        q, k, v = (row_after_row(x) for x in (query, key, value))
        context = attend(q, k, v, packed_seq_params.segments, self.softmax_scale)
        joined: Tensor = self.join_heads(side_by_side(context, rows=query.shape[1]))
        return joined


def row_after_row(x: Tensor) -> Tensor:
    """`[s, b, heads, d]` to `[b*s, heads, d]`, so that a segment's tokens are neighbours; for one row a view."""
    return x.transpose(0, 1).flatten(0, 1)


def side_by_side(context: Tensor, rows: int) -> Tensor:
    """The way back: `[b*s, h, d]` to `[s, b, h, d]`."""
    return context.unflatten(0, (rows, -1)).transpose(0, 1)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """q `[Tq, h, d]`, k and v `[Tk, g, d]` to the context `[Tq, h, d]`, each segment for itself.

    flash-attn's varlen kernel does it in one call where it is installed and can be used (16-bit tensors on a GPU);
    elsewhere the segments go through torch's scaled_dot_product_attention.
    """
    assert segments.causal
    if flash_attn_varlen_func is None or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return _by_segment(query, key, value, segments, scale)
    return flash_attn_varlen_func(
        query,
        key,
        value,
        segments.query_starts,
        segments.key_starts,
        segments.longest_queries,
        segments.longest_keys,
        softmax_scale=scale,
        causal=True,  # With fewer queries than keys the last of both are aligned, since version 2.1.
    )


def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Segments of one length go through the kernel together, as a batch."""
    by_kind = in_batches(query, segments, "query"), in_batches(key, segments, "key"), in_batches(value, segments, "key")
    contexts = []
    for q, k, v in zip(*by_kind, strict=True):
        seen = None if q.shape[2] == k.shape[2] else _aligned_at_the_end(q.shape[2], k.shape[2], q.device)
        context = scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
        )
        contexts.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(contexts)[segments.queries_in_order]


def in_batches(x: Tensor, segments: Segments, of: Literal["query", "key"]) -> list[Tensor]:
    """`[T, heads, d]` as one `[segments, heads, length, d]` for each kind of segment, shortest first."""
    order = segments.queries_by_length if of == "query" else segments.keys_by_length
    shapes = [(count, queries if of == "query" else keys) for queries, keys, count in segments.kinds]
    parts = x[order].split([count * length for count, length in shapes])
    return [part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def _aligned_at_the_end(queries: int, keys: int, device: torch.device) -> Tensor:
    """`[queries, keys]` bool: True where a query sees a key; the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
