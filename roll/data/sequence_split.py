"""Assignment of a row's tokens to ranks, where a sequence is split over them from the embedding to the head.

Everything that a rank does with its part of a row asks here: the model's input, positions, targets and labels, and the
order in which gathered keys, values and results stand. Legend: n ranks, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from roll.config import ParallelSettings
from roll.data.packing import check_divides


@dataclass(frozen=True)
class SequenceSplit:
    """The rule that deals rows to the ranks of the context-parallel group, and this rank's place in it.

    Contiguous (mode isp, and cp_comm a2a): equal parts of the row, wherever its segments begin. Zigzag: every segment
    is cut into 2n chunks, of which rank r holds r and 2n - 1 - r, an early one, which sees little under the causal
    mask, and a late one, which sees much.

    Example: segments of 8 and 4 tokens, two ranks. Contiguous, rank 0 holds tokens 0-5, rank 1 tokens 6-11. Zigzag,
    rank 0 holds 0 1 6 7 and 8 11, rank 1 holds 2 3 4 5 and 9 10.
    """

    parallel: ParallelSettings
    rank: int
    """This rank's place in the group."""

    @property
    def ranks(self) -> int:
        """n."""
        return self.parallel.context_parallel

    def held(self, cu_seqlens: Tensor) -> HeldTokens:
        """Tokens that each rank holds of a row with segments that begin at `cu_seqlens` `[segments + 1]`, T at the end.

        Raises:
            ValueError: the row, or with zigzag a segment, does not divide.
        """
        lengths = cu_seqlens.diff().long()
        total = int(lengths.sum())
        if not self.parallel.zigzag:
            check_divides(total, self.ranks)
            return HeldTokens(torch.arange(total).view(self.ranks, -1), self.rank)
        chunks = 2 * self.ranks
        for length in lengths.unique().tolist():
            check_divides(length, chunks, "chunks of a sequence")
        positions = torch.arange(total) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        chunk = positions // (lengths // chunks).repeat_interleave(lengths)
        # Stable, so that a rank's tokens keep the order of the row.
        by_owner = torch.sort(torch.minimum(chunk, chunks - 1 - chunk), stable=True).indices
        return HeldTokens(by_owner.view(self.ranks, -1), self.rank)


WHOLE = SequenceSplit(ParallelSettings(), rank=0)
"""Every token on the only rank."""


@dataclass(frozen=True)
class HeldTokens:
    """The tokens of one row that each rank holds."""

    by_rank: Tensor
    """`[n, T/n]` int64 on CPU: the tokens of each rank, in the order of the row."""
    rank: int

    def own(self, whole: Tensor, dim: int = -1) -> Tensor:
        """This rank's tokens of what all T tokens have, along `dim`."""
        return whole.index_select(dim, self.by_rank[self.rank].to(whole.device))

    def in_order(self, gathered: Tensor, dim: int = -1) -> Tensor:
        """The parts of all ranks, one after the other along `dim`, in the order of the row. Differentiable."""
        return gathered if self._is_in_order else gathered.index_select(dim, self._places.to(gathered.device))

    @cached_property
    def _places(self) -> Tensor:
        """`[T]`: where each token of the row stands among the gathered."""
        return self.by_rank.flatten().argsort()

    @cached_property
    def _is_in_order(self) -> bool:
        return bool((self.by_rank.flatten().diff() == 1).all())
