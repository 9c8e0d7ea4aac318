"""What travels beside the hidden states through a Megatron-Core model: where segments begin, where tokens stand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from roll.data.packing import PackedRows
from roll.data.sequence_split import WHOLE, HeldTokens, SequenceSplit
from roll.models.segments import Segments, ZigzagBlocks


@dataclass(kw_only=True)
class PackedSequence(PackedSeqParams):
    """Megatron-Core's packed parameters with the position of every token of this rank.

    `qkv_format` stays `sbhd`: with `thd` Megatron-Core would cut RoPE by `cu_seqlens` itself (attention.py:1081),
    which is wrong for any split of the sequence but its own.
    """

    split: SequenceSplit
    held: HeldTokens
    """The tokens of a row that this rank holds, and the others."""
    lengths: Tensor
    """`[segments]` int64 on CPU: of all segments of all rows, with what fills them up."""
    position_ids: Tensor
    """`[s]` int64: of this rank's tokens of a row, from 0 in each segment."""
    segment_lengths: Tensor
    """`[s]` int64: the length of the whole segment that each token of this rank belongs to, without its filling."""

    @classmethod
    def of(cls, rows: PackedRows, split: SequenceSplit = WHOLE) -> PackedSequence:
        """Of packed rows."""
        device = rows.input_ids.device
        return cls.packed(rows.cu_seqlens, split, lengths=rows.segment_lengths, device=device)

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        split: SequenceSplit = WHOLE,
        *,
        lengths: Tensor | None = None,
        device: torch.device | None = None,
    ) -> PackedSequence:
        """Of one row whose segments begin at `cu_seqlens` (on CPU); `lengths` `[segments]` without their filling."""
        filled = cu_seqlens.diff().long()
        return cls._from(filled, filled if lengths is None else lengths, filled, split, device)

    @classmethod
    def unpacked(
        cls,
        rows: int,
        length: int,
        split: SequenceSplit = WHOLE,
        *,
        filled: int | None = None,
        device: torch.device | None = None,
    ) -> PackedSequence:
        """Of `rows` rows of `length` tokens each, filled up to `filled`."""
        row = torch.tensor([length if filled is None else filled])
        return cls._from(row, torch.tensor([length]), row.repeat(rows), split, device)

    @classmethod
    def _from(
        cls,
        row: Tensor,
        lengths: Tensor,
        all_segments: Tensor,
        split: SequenceSplit,
        device: torch.device | None,
    ) -> PackedSequence:
        """`row` are the filled lengths of one row's segments, `lengths` those without filling."""
        ends = row.cumsum(0)
        held = split.held(torch.cat([ends.new_zeros(1), ends]))
        positions = torch.arange(int(ends[-1])) - (ends - row).repeat_interleave(row)
        return cls(
            qkv_format="sbhd",
            split=split,
            held=held,
            lengths=all_segments,
            position_ids=held.own(positions).to(device),
            segment_lengths=held.own(lengths.repeat_interleave(row)).to(device),
        )

    def own(self, whole: Tensor) -> Tensor:
        """This rank's tokens of rows `[b, T]`."""
        return self.held.own(whole, dim=1)

    @cached_property
    def segments(self) -> Segments:
        """All segments, each attending to itself."""
        return Segments(self.lengths, self.lengths, self.position_ids.device)

    @cached_property
    def zigzag(self) -> ZigzagBlocks:
        """What this rank of a zigzag split has to compute."""
        assert self.split.parallel.zigzag
        return ZigzagBlocks(self.lengths, self.split.ranks, self.split.rank, self.position_ids.device)
