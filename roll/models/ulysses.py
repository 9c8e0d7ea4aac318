"""Attention over a sequence that is split over ranks, by exchanging heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

Outside attention a rank holds all heads of its own tokens; inside, its share of the heads for all tokens. Legend: n
ranks of the sequence-parallel group, s tokens of a whole row, b rows, h query heads, g kv heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.models.attention import PackedCausalAttention
from roll.models.packed_sequence import PackedSequence


class UlyssesAttention(nn.Module):
    """Attention over all tokens between two exchanges. RoPE is applied before, at this rank's own positions."""

    def __init__(self, *args: Any, pg_collection: ProcessGroupCollection, **kwargs: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp
        self.exchange = HeadExchange(self.group)
        self.local_attention = PackedCausalAttention(*args, **kwargs)
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
        own_query, own_key_value = self.exchange(query, torch.stack((key, value), dim=2))
        own_key, own_value = own_key_value.unbind(2)
        context = self.local_attention(own_query, own_key, own_value, None, packed_seq_params=packed_seq_params)
        joined: Tensor = self.join_heads(ranks_to_heads(context.unflatten(-1, (-1, query.shape[-1])), self.group))
        return joined


class HeadExchange(nn.Module):
    """The exchange before attention: from all heads of this rank's tokens to this rank's heads of all tokens."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, query: Tensor, key_value: Tensor) -> tuple[Tensor, Tensor]:
        """q `[s/n, b, h, d]` and kv `[s/n, b, 2, g, d]` to `[s, b, h/n, d]` and `[s, b, 2, max(g/n, 1), d]`."""
        # With fewer kv heads than ranks several ranks need the same one: copies stand next to each other, as the
        # query heads that they serve do. Autograd sums the gradients of the copies.
        copies = max(1, self.group.size() // key_value.shape[3])
        key_value = key_value.repeat_interleave(copies, dim=3)
        return heads_to_ranks(query, self.group), heads_to_ranks(key_value, self.group, dim=3)


def heads_to_ranks(x: Tensor, group: ProcessGroup, dim: int = 2) -> Tensor:
    """`[s/n, b, heads, ...]` of this rank's tokens to `[s, b, heads/n, ...]` of its heads. Differentiable.

    `dim` is the dimension of the heads.
    """
    by_receiver = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0)
    return all_to_all(group, by_receiver.contiguous()).flatten(0, 1)


def ranks_to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    """The way back: `[s, b, heads/n, ...]` to `[s/n, b, heads, ...]`. Differentiable."""
    by_receiver = x.unflatten(0, (group.size(), -1))
    return all_to_all(group, by_receiver.contiguous()).movedim(0, 2).flatten(2, 3)
