"""Causal attention within the segments of a packed row: the core attention of our layer spec.

Legend: T tokens, h query heads and g kv heads of this rank, d head size.
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
    elsewhere each segment goes through torch's scaled_dot_product_attention.
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
        """q `[T, 1, h, d]`, k and v `[T, 1, g, d]` to the context `[T, 1, h*d]`."""
        if flash_attn_varlen_func is not None and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            attend = self._flash
        else:
            attend = self._by_segment
        context = attend(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params)
        return context.flatten(1).unsqueeze(1)

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
        lengths = packed.cu_seqlens_q.diff().tolist()
        contexts = [
            scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=True,
            )
            for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat([context.squeeze(0).transpose(0, 1) for context in contexts])
