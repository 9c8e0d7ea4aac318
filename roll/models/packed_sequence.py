"""What travels beside the hidden states through a Megatron-Core model: where segments begin, where tokens stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll.data.packing import PackedRows, check_divides


@dataclass
class PackedSequence(PackedSeqParams):
    """Megatron-Core's packed parameters with the position of every token of this rank.

    `qkv_format` stays `sbhd`: with `thd` Megatron-Core would cut RoPE by `cu_seqlens` itself (attention.py:1081),
    which is wrong for any split of the sequence but its own.
    """

    position_ids: Tensor | None = None
    """`[s]` int64: of this rank's tokens of a row."""
    segment_lengths: Tensor | None = None
    """`[s]` int64: the length of the whole segment that each token of this rank belongs to."""
    by_length: Tensor | None = None
    """`[T]` int64: the tokens of the shortest segments first, those of the longest last."""
    lengths: tuple[tuple[int, int], ...] = ()
    """(length, number of segments of that length), shortest first."""

    @classmethod
    def of(cls, rows: PackedRows, shard: int = 0, shards: int = 1) -> PackedSequence:
        """Of packed rows, on the rank that holds part `shard` of `shards` equal parts of them."""
        return cls.packed(rows.cu_seqlens, rows.position_ids[0], shard, shards)

    @classmethod
    def packed(cls, cu_seqlens: Tensor, position_ids: Tensor, shard: int = 0, shards: int = 1) -> PackedSequence:
        """Of one row whose segments begin at `cu_seqlens` (on CPU); `position_ids` of the whole row, `[T]`."""
        check_divides(len(position_ids), shards)
        return cls.of_shard(cu_seqlens, position_ids.chunk(shards)[shard], shard, shards)

    @classmethod
    def of_shard(cls, cu_seqlens: Tensor, position_ids: Tensor, shard: int = 0, shards: int = 1) -> PackedSequence:
        """The same from the positions of this rank's own tokens, `[T/shards]`."""
        lengths = cu_seqlens.diff().long()
        own_lengths = lengths.repeat_interleave(lengths).chunk(shards)[shard]
        return cls._from(cu_seqlens, position_ids, own_lengths)

    @classmethod
    def unpacked(
        cls, rows: int, length: int, shard: int = 0, shards: int = 1, *, device: torch.device | None = None
    ) -> PackedSequence:
        """Of `rows` rows of `length` tokens each, on the rank that holds part `shard` of each of them."""
        check_divides(length, shards)
        cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        positions = torch.arange(length, device=device).chunk(shards)[shard]
        return cls._from(cu_seqlens, positions, torch.full_like(positions, length))

    @classmethod
    def _from(cls, cu_seqlens: Tensor, position_ids: Tensor, segment_lengths: Tensor) -> PackedSequence:
        device = position_ids.device
        lengths = cu_seqlens.diff()
        # Stable, so that the tokens of a segment stay together and in order.
        by_length = torch.sort(lengths.repeat_interleave(lengths), stable=True).indices
        kinds, counts = lengths.unique(return_counts=True)
        on_device = cu_seqlens.to(device)
        longest = int(lengths.max())
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            position_ids=position_ids,
            segment_lengths=segment_lengths.to(device),
            by_length=by_length.to(device),
            lengths=tuple(zip(kinds.tolist(), counts.tolist(), strict=True)),
        )
