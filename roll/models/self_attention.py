"""Self-attention with q, k and v taken out of wqkv's output as InternEvo's are: by head, then k and v as one kv.

Legend: b rows of s tokens, h query heads and g kv heads of this rank, d head size.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn


class SplitHeads(nn.Module):
    """Takes the query heads and the key-value heads out of wqkv's output. kv is a view."""

    def forward(self, by_head: Tensor) -> tuple[Tensor, Tensor]:
        """`[s, b, g, h/g + 2, d]` to q `[s, b, h, d]` and kv `[s, b, 2, g, d]`."""
        queries = by_head.shape[3] - 2
        query, key_value = by_head.split((queries, 2), dim=3)
        return query.flatten(2, 3), key_value.transpose(2, 3)


class GroupedQueryAttention(SelfAttention):
    """Megatron-Core's self-attention for as many kv heads as tensor-parallel ranks or more, with `SplitHeads`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.split_heads = SplitHeads()

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`[s, b, H]` to q `[s, b, h, d]`, k and v `[s, b, g, d]`, normed where the family has such norms.

        The input is `[s/tp, b, H]` under sequence parallelism.
        """
        assert split_qkv and not output_gate  # Options of Megatron-Core that our config leaves off.
        qkv, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        by_head = qkv.unflatten(-1, (groups, -1, self.hidden_size_per_attention_head))
        query, key_value = self.split_heads(by_head)
        key, value = key_value.unbind(2)
        if self.q_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value
