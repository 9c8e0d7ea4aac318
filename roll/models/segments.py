"""Which queries attend to which keys: segment by segment, whole or in the chunks of a zigzag split.

Legend: Tq queries and Tk keys of this rank's attention, n ranks of the context-parallel group, r this rank. Of a zigzag
split a segment of 2n c tokens has 2n chunks of c; this rank holds the early chunk r and the late chunk 2n - 1 - r,
which stand next to each other: 2c tokens, the first half early, the second late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Segments of queries and of keys, the i-th of the one attending to the i-th of the other.

    If `causal`, the last query of a segment sees its last key, the one before it all but the last, and so on; else
    every query sees every key.
    """

    query_lengths: Tensor
    """`[segments]` int64 on CPU, none 0."""
    key_lengths: Tensor
    """`[segments]` int64 on CPU, in a fixed ratio to those of the queries."""
    device: torch.device
    causal: bool = True

    @cached_property
    def query_starts(self) -> Tensor:
        """`[segments + 1]` int32: cu_seqlens of the queries, as kernels for unequal lengths take them."""
        return _starts(self.query_lengths).to(self.device)

    @cached_property
    def key_starts(self) -> Tensor:
        """`[segments + 1]` int32, of the keys."""
        return _starts(self.key_lengths).to(self.device)

    @cached_property
    def longest_queries(self) -> int:
        """Queries of the longest segment."""
        return int(self.query_lengths.max())

    @cached_property
    def longest_keys(self) -> int:
        """Keys of the longest segment."""
        return int(self.key_lengths.max())

    @cached_property
    def queries_by_length(self) -> Tensor:
        """`[Tq]` int64: the tokens of the shortest segments first, those of the longest last."""
        return _by_length(self.query_lengths).to(self.device)

    @cached_property
    def queries_in_order(self) -> Tensor:
        """`[Tq]` int64: where each token stands in `queries_by_length`."""
        return self.queries_by_length.argsort()

    @cached_property
    def keys_by_length(self) -> Tensor:
        """`[Tk]` int64."""
        return _by_length(self.key_lengths).to(self.device)

    @cached_property
    def keys_in_order(self) -> Tensor:
        """`[Tk]` int64."""
        return self.keys_by_length.argsort()

    @cached_property
    def kinds(self) -> tuple[tuple[int, int, int], ...]:
        """(queries, keys, number of segments of these lengths), shortest first."""
        queries, counts = self.query_lengths.unique(return_counts=True)
        keys = self.key_lengths.unique()
        return tuple(zip(queries.tolist(), keys.tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True)
class Block:
    """Attention of some of this rank's queries to some of the keys at hand."""

    segments: Segments
    queries: Tensor
    """`[Tq]` int64: which queries, by their place among this rank's tokens."""
    keys: Tensor
    """`[Tk]` int64: which keys, by their place among those at hand."""


@dataclass(frozen=True)
class ZigzagBlocks:
    """What rank `rank` of a zigzag split has to compute, given every key or those of one rank."""

    lengths: Tensor
    """`[segments]` int64 on CPU: of the whole segments, each a multiple of 2n."""
    ranks: int
    rank: int
    device: torch.device

    def of_source(self, source: int) -> Block:
        """Given the keys of rank `source`: its early chunk comes before all of this rank's late one, and its late chunk
        after all of this rank's early one, so that no block but the own one needs a mask.
        """
        if source == self.rank:
            return self._own
        return self._of_earlier_rank if source < self.rank else self._of_later_rank

    @cached_property
    def of_all(self) -> tuple[Block, Block]:
        """Given all keys in order: the early chunk's queries and the late one's, each up to their own tokens."""
        early, late = self._halves
        blocks = []
        for queries, chunks in ((early, self.rank + 1), (late, 2 * self.ranks - self.rank)):
            seen = self._chunk * chunks
            blocks.append(self._block(queries, _first_of(self.lengths, seen), self._chunk, seen, causal=True))
        return blocks[0], blocks[1]

    @cached_property
    def _own(self) -> Block:
        return self._block(self._all, self._all, 2 * self._chunk, 2 * self._chunk, causal=True)

    @cached_property
    def _of_earlier_rank(self) -> Block:
        """All queries see the early chunk, none the late one."""
        return self._block(self._all, self._halves[0], 2 * self._chunk, self._chunk, causal=False)

    @cached_property
    def _of_later_rank(self) -> Block:
        """The late chunk's queries see both, the early one's none."""
        return self._block(self._halves[1], self._all, self._chunk, 2 * self._chunk, causal=False)

    def _block(
        self, queries: Tensor, keys: Tensor, query_lengths: Tensor, key_lengths: Tensor, *, causal: bool
    ) -> Block:
        segments = Segments(query_lengths, key_lengths, self.device, causal)
        return Block(segments, queries.to(self.device), keys.to(self.device))

    @cached_property
    def _chunk(self) -> Tensor:
        """c, `[segments]`."""
        return self.lengths // (2 * self.ranks)

    @cached_property
    def _all(self) -> Tensor:
        """This rank's own tokens."""
        return torch.arange(int(2 * self._chunk.sum()))

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        """The early and the late tokens among this rank's own."""
        early = _first_of(2 * self._chunk, self._chunk)
        return early, early + self._chunk.repeat_interleave(self._chunk)


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)


def _by_length(lengths: Tensor) -> Tensor:
    # Stable, so that the tokens of a segment stay together and in order.
    return torch.sort(lengths.repeat_interleave(lengths), stable=True).indices


def _first_of(lengths: Tensor, first: Tensor) -> Tensor:
    """The first `first` tokens of each of the segments of these lengths, which stand one after the other."""
    starts = lengths.cumsum(0) - lengths - (first.cumsum(0) - first)
    return torch.arange(int(first.sum())) + starts.repeat_interleave(first)
