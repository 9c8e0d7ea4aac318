"""Groups of whole samples (`use_packed_dataset=False`): up to `micro_bsz` samples, each cut to `seq_len`, no carry.

A pack holds the samples of its group one after the other and then padding; `unpack_data` turns it into rows
`[micro_bsz, seq_len]` when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.packs import Pack, Piece, build_all, check_sizes
from roll.data.sources.lists import ListSource
from roll.data.sources.sample import Ids, SampleSource


class UnpackPlan:
    """Samples that each pack holds: disjoint groups of `micro_bsz` samples, the last perhaps of fewer.

    Of a sample longer than `seq_len` the rest is discarded, and its last kept token has no label. Empty samples are
    skipped and take no place in a group.
    """

    def __init__(self, lengths: Ids, *, micro_bsz: int, seq_len: int) -> None:
        check_sizes(micro_bsz, seq_len)
        self._micro_bsz = micro_bsz
        self._samples = np.flatnonzero(lengths)
        self._lengths = np.minimum(lengths[self._samples], seq_len)
        self.num_tokens = int(self._lengths.sum())

    def __len__(self) -> int:
        return -(-len(self._samples) // self._micro_bsz)

    def __getitem__(self, index: int) -> list[Piece]:
        """The pieces of a group: at most `micro_bsz`, none of them empty."""
        if not 0 <= index < len(self):
            raise IndexError(f"group {index} of {len(self)}")
        group = slice(index * self._micro_bsz, (index + 1) * self._micro_bsz)
        pairs = zip(self._samples[group].tolist(), self._lengths[group].tolist(), strict=True)
        return [Piece(sample, 0, length, known=length) for sample, length in pairs]


def count_without_label(source: SampleSource, seq_len: int) -> int:
    """Samples whose labels are all cut off with what is behind `seq_len` tokens: their prompts fill the row.

    Only longer samples are read.
    """
    longer = np.flatnonzero(source.lengths > seq_len).tolist()
    return sum(not source[number].in_loss[1:seq_len].any() for number in longer)


def build_unpack(samples: Sequence[Sequence[int]], *, micro_bsz: int, seq_len: int) -> list[Pack]:
    """The groups of up to `micro_bsz` samples, each cut to `seq_len`, padded to P = micro_bsz * seq_len tokens.

    Samples are token ids; a negative id is a token that is no label; empty samples are skipped.

    Raises ValueError for a size below 1 and for samples that are not flat sequences of integers.
    """
    source = ListSource(samples)
    plan = UnpackPlan(source.lengths, micro_bsz=micro_bsz, seq_len=seq_len)
    return build_all(plan, source, micro_bsz=micro_bsz, seq_len=seq_len)
