"""Attention over a zigzag-split sequence, keys and values going around (Liu et al. 2023, Ring Attention).

In n steps every rank sees the keys and values of all n, one rank's at a time, and merges what it gets. While it
computes with those at hand they are already on their way to the next rank. Legend: n ranks of the context-parallel
group, t tokens of this rank (of all its rows, one after the other), b rows of s tokens, h query heads, g kv heads, d
head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roll.models.attention import row_after_row, side_by_side
from roll.models.packed_sequence import PackedSequence
from roll.models.partial_attention import attend_partly, merge, partial_gradients
from roll.models.segments import ZigzagBlocks
from roll.parallel.ring import Arriving, Ring


class RingAttention(nn.Module):
    """Attention of this rank's tokens to those of all ranks. RoPE is applied before, at this rank's own positions."""

    def __init__(
        self,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__()
        self.ring = Ring(pg_collection.cp)
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
        """q `[s/n, b, h, d]`, k and v `[s/n, b, g, d]` to the context `[s/n, b, h*d]` of the same tokens."""
        q, k, v = (row_after_row(x) for x in (query, key, value))
        context = _RingAttention.apply(q, k, v, packed_seq_params.zigzag, self.ring, self.softmax_scale)
        joined: Tensor = self.join_heads(side_by_side(context, rows=query.shape[1]))
        return joined


class _RingAttention(torch.autograd.Function):
    """Nothing of the other ranks is kept for backward: their keys and values go around again, and the gradients of each
    rank's with them, until they are back where they belong.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: ZigzagBlocks, ring: Ring, scale: float | None
    ) -> Tensor:
        """q `[t, h, d]`, k and v `[t, g, d]` to the context `[t, h, d]`."""
        at_hand = torch.stack((key, value))
        for step in range(ring.size):
            if step < ring.size - 1:
                arriving = ring.pass_on(at_hand)
            block = blocks.of_source((ring.rank - step) % ring.size)
            k, v = at_hand[:, block.keys]
            part = attend_partly(query[block.queries], k, v, block.segments, scale)
            if step == 0:
                context, lse = part  # The own block has all queries.
            else:
                context[block.queries], lse[block.queries] = merge((context[block.queries], lse[block.queries]), part)
            if step < ring.size - 1:
                at_hand = arriving.wait()
        context = context.to(query.dtype)
        ctx.save_for_backward(query, key, value, context, lse)
        ctx.blocks, ctx.ring, ctx.scale = blocks, ring, scale
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        query, key, value, context, lse = ctx.saved_tensors
        blocks, ring = ctx.blocks, ctx.ring
        d_query = torch.zeros_like(query, dtype=lse.dtype)
        at_hand = torch.stack((key, value))
        d_at_hand = torch.zeros_like(at_hand, dtype=lse.dtype)
        d_arriving: Arriving | None = None
        for step in range(ring.size):
            if step < ring.size - 1:
                arriving = ring.pass_on(at_hand)
            block = blocks.of_source((ring.rank - step) % ring.size)
            q, g, out, denominator = (x[block.queries] for x in (query, gradient, context, lse))
            k, v = at_hand[:, block.keys]
            dq, dk, dv = partial_gradients(g, q, k, v, (out, denominator), block.segments, ctx.scale)
            d_query.index_add_(0, block.queries, dq)
            if d_arriving is not None:
                d_at_hand = d_arriving.wait()
            d_at_hand.index_add_(1, block.keys, torch.stack((dk, dv)))
            # One step behind the keys and values themselves, and one step further: to where they came from.
            d_arriving = ring.pass_on(d_at_hand)
            if step < ring.size - 1:
                at_hand = arriving.wait()
        assert d_arriving is not None
        d_key, d_value = d_arriving.wait()
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None
