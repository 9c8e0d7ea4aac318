"""What travels beside the hidden states through a Megatron-Core model: where segments begin, where tokens stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll.data.packing import PackedRows


@dataclass
class PackedSequence(PackedSeqParams):
    """Megatron-Core's packed parameters with the position of every token of this rank.

    `qkv_format` stays `sbhd`: with `thd` Megatron-Core would cut RoPE by `cu_seqlens` itself (attention.py:1081),
    which is wrong for any split of the sequence but its own.
    """

    position_ids: Tensor | None = None
    """`[T]` int64."""
    segment_lengths: Tensor | None = None
    """`[T]` int64: the length of the whole segment that each token of this rank belongs to."""
    by_length: Tensor | None = None
    """`[T]` int64: the tokens of the shortest segments first, those of the longest last."""
    lengths: tuple[tuple[int, int], ...] = ()
    """(length, number of segments of that length), shortest first."""

    @classmethod
    def of(cls, rows: PackedRows) -> PackedSequence:
        device = rows.input_ids.device
        cu_seqlens = rows.cu_seqlens.to(device)
        lengths = rows.cu_seqlens.diff().long()
        # Stable, so that the tokens of a segment stay together and in order.
        by_length = torch.sort(lengths.repeat_interleave(lengths), stable=True).indices
        kinds, counts = lengths.unique(return_counts=True)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=rows.max_seqlen,
            max_seqlen_kv=rows.max_seqlen,
            position_ids=rows.position_ids[0],
            segment_lengths=lengths.repeat_interleave(lengths).to(device),
            by_length=by_length.to(device),
            lengths=tuple(zip(kinds.tolist(), counts.tolist(), strict=True)),
        )
