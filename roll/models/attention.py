"""Causal attention within the segments of a packed row: the core attention of our layer spec.

Legend: b rows of s tokens (one packed row, or several of equal length), T = b*s tokens, h query heads and g kv heads of
this rank, d head size.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from roll.models.packed_sequence import PackedSequence

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


class PackedCausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v with the causal mask, each token within its own segment.

    flash-attn's varlen kernel does it in one call where it is installed and can be used (16-bit tensors on a GPU);
    elsewhere the segments go through torch's scaled_dot_product_attention.
    """

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
        if flash_attn_varlen_func is not None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            attend = self._flash
        else:
            attend = self._by_segment
        # Row after row, so that a segment's tokens are neighbours; for one row a view.
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        context = attend(q, k, v, packed_seq_params)
        return context.flatten(1).unflatten(0, (query.shape[1], -1)).transpose(0, 1)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence) -> Tensor:
        return flash_attn_varlen_func(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            softmax_scale=self.softmax_scale,
            causal=True,
        )

    def _by_segment(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequence) -> Tensor:
        """Each segment for itself; those of one length go through the kernel together, as a batch."""
        assert packed.by_length is not None
        sizes = [length * count for length, count in packed.lengths]
        shares = [x[packed.by_length].split(sizes) for x in (query, key, value)]
        contexts = []
        for (length, count), *parts in zip(packed.lengths, *shares, strict=True):
            q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
            context = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
            contexts.append(context.transpose(1, 2).flatten(0, 1))
        return torch.cat(contexts)[packed.by_length.argsort()]
