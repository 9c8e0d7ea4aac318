"""Packing by cutting (`use_packed_dataset=True`): samples one after the other, cut into packs of P tokens.

A sample that does not fit is cut at the pack's end; its rest opens the next pack as a segment of its own, which does
not see the part before. The label at the cut is the true next token, so no label is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.packs import Pack, Piece, build_all, check_sizes
from roll.data.sources.lists import ListSource
from roll.data.sources.sample import Ids


class PackPlan:
    """Tokens that each pack holds, by sample, found by binary search in the samples' ends.

    Pack i holds tokens `[i * P, (i + 1) * P)` of the stream. The last is padded if the stream ends inside it, or left
    out with `drop_last`. Empty samples hold no token, so they are skipped.
    """

    def __init__(self, lengths: Ids, *, micro_bsz: int, seq_len: int, drop_last: bool = False) -> None:
        check_sizes(micro_bsz, seq_len)
        self._pack_length = micro_bsz * seq_len
        self._ends = np.cumsum(lengths, dtype=np.int64)
        total = int(self._ends[-1]) if len(lengths) else 0
        whole, rest = divmod(total, self._pack_length)
        self._num_packs = whole if drop_last or not rest else whole + 1
        self.num_tokens = min(total, self._num_packs * self._pack_length)

    def __len__(self) -> int:
        return self._num_packs

    def __getitem__(self, index: int) -> list[Piece]:
        """The pieces of a pack, in order; none is empty."""
        if not 0 <= index < len(self):
            raise IndexError(f"pack {index} of {len(self)}")
        start = index * self._pack_length
        stop = min(start + self._pack_length, self.num_tokens)
        first = int(np.searchsorted(self._ends, start, side="right"))  # the first sample that ends after `start`
        last = int(np.searchsorted(self._ends, stop, side="left"))  # the first sample that ends at `stop` or after
        ends = self._ends[first : last + 1].tolist()
        sample_start = int(self._ends[first - 1]) if first else 0
        pieces = []
        for sample, sample_end in enumerate(ends, start=first):
            begin, end = max(start, sample_start), min(stop, sample_end)
            if begin < end:
                length = sample_end - sample_start
                pieces.append(Piece(sample, begin - sample_start, end - sample_start, known=length))
            sample_start = sample_end
        return pieces


def build_pack(
    samples: Sequence[Sequence[int]], *, micro_bsz: int, seq_len: int, drop_last: bool = False
) -> list[Pack]:
    """All packs of P = micro_bsz * seq_len tokens that these samples make, in order.

    Args:
        samples: token ids; a negative id is a token that is no label. Empty samples are skipped.
        micro_bsz: with `seq_len` it makes P; a pack may hold any number of segments.
        seq_len: no segment is longer, except the padding.
        drop_last: leave out a last pack that is not full instead of padding it.

    Raises ValueError for a size below 1 and for samples that are not flat sequences of integers.
    """
    source = ListSource(samples)
    plan = PackPlan(source.lengths, micro_bsz=micro_bsz, seq_len=seq_len, drop_last=drop_last)
    return build_all(plan, source, micro_bsz=micro_bsz, seq_len=seq_len)
