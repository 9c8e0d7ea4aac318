"""Attention over a zigzag-split sequence, every rank gathering the keys and values of all (Llama 3, section 3.3.2).

Legend: n ranks of the context-parallel group, b rows of s tokens, h query heads, g kv heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from roll.models.attention import attend, row_after_row, side_by_side
from roll.models.packed_sequence import PackedSequence


class AllGatherAttention(nn.Module):
    """Attention of this rank's tokens to those of all ranks. RoPE is applied before, at this rank's own positions.

    The keys and values of the whole sequence are kept for backward; their gradients are summed over the ranks and
    scattered.
    """

    def __init__(
        self,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__()
        self.group = pg_collection.cp
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
        gathered = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), group=self.group)
        k, v = (row_after_row(x) for x in packed_seq_params.held.in_order(gathered, dim=0).unbind(1))
        q = row_after_row(query)
        context, places = [], []
        for block in packed_seq_params.zigzag.of_all:
            part = attend(q[block.queries], k[block.keys], v[block.keys], block.segments, self.softmax_scale)
            context.append(part)
            places.append(block.queries)
        in_place = torch.cat(context)[torch.cat(places).argsort()]
        joined: Tensor = self.join_heads(side_by_side(in_place, rows=query.shape[1]))
        return joined
