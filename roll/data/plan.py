"""The micro-batch plan: made once, from the real lengths of the rows, before anything is sent.

Rows are first dealt to the data-parallel ranks, longest first, each to the rank with the least work so far. Then each
rank's rows are packed: as few micro-batches as the token budget allows on the rank that needs most, the same number on
every rank, with the work of a rank spread evenly over them. A rank with fewer rows than that gets some micro-batches
without rows: the pipeline schedule, and the ranks that gather weights together, need the same number everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from roll.errors import UserError
from roll.protocol.plan import MicroBatchPlan

# Work of a row of n tokens, up to a factor: the matrix products cost n * 24 h^2 FLOPs per layer (h hidden size, MLP of
# 4h) and causal attention n^2 * 2h, so attention costs as much as the products at n = 12 h; h = 2048 is assumed.
EQUAL_COST_TOKENS = 12 * 2048


class _Row(NamedTuple):
    number: int
    tokens: int

    @property
    def work(self) -> float:
        return self.tokens * (1 + self.tokens / EQUAL_COST_TOKENS)


@dataclass
class _Bin:
    """Rows with the sums of their tokens and work: a share or a micro-batch."""

    rows: list[_Row] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0

    def add(self, row: _Row) -> None:
        self.rows.append(row)
        self.tokens += row.tokens
        self.work += row.work

    def fits(self, row: _Row, max_tokens: int) -> bool:
        """Tell whether the row may be added; an empty bin takes any row."""
        return not self.rows or self.tokens + row.tokens <= max_tokens

    @property
    def numbers(self) -> list[int]:
        """Row numbers, in the order of the batch."""
        return sorted(row.number for row in self.rows)


def plan_micro_batches(
    lengths: Sequence[int],
    dp_size: int,
    *,
    max_tokens: int | None = None,
    rows: int | None = None,
    multiple_of: int = 1,
) -> MicroBatchPlan:
    """Deal rows to data-parallel ranks and cut each rank's share into micro-batches.

    Every rank gets the same number of rows if they divide (else one more on some), and the same number of
    micro-batches, at least one. Only a rank with fewer rows than micro-batches has empty ones, which come last. A share
    keeps its rows in the order of the batch. Same input, same plan.

    Args:
        lengths: real tokens of each row of the batch.
        dp_size: data-parallel ranks.
        max_tokens: no micro-batch has more tokens, except that a longer row stands alone. Micro-batches of equal
            index have similar work, and the heaviest comes first.
        rows: instead of `max_tokens`: rows of a micro-batch. The last of a share may have fewer, and so may all of a
            share that makes more micro-batches than it fills.
        multiple_of: the number of micro-batches on each rank is a multiple of it.

    Raises:
        ValueError: a setting is out of range, or a length is negative.
    """
    _check(lengths, dp_size, max_tokens, rows, multiple_of)
    shares = _deal([_Row(number, tokens) for number, tokens in enumerate(lengths)], dp_size)
    if rows is not None:
        count = _common_count([ceil(len(share.rows) / rows) for share in shares], multiple_of)
        cuts = [_cut(share.numbers, rows, count) for share in shares]
    else:
        assert max_tokens is not None
        packed = _pack(shares, max_tokens, multiple_of)
        cuts = [[micro_batch.numbers for micro_batch in micro_batches] for micro_batches in packed]
    return _as_plan(shares, cuts)


def _as_plan(shares: list[_Bin], cuts: list[list[list[int]]]) -> MicroBatchPlan:
    """The plan from row numbers of the batch."""
    positions = [{number: position for position, number in enumerate(share.numbers)} for share in shares]
    return MicroBatchPlan(
        shares=tuple(
            tuple(tuple(position[number] for number in micro_batch) for micro_batch in cut)
            for position, cut in zip(positions, cuts, strict=True)
        ),
        rows=tuple(tuple(share.numbers) for share in shares),
    )


def _check(lengths: Sequence[int], dp_size: int, max_tokens: int | None, rows: int | None, multiple_of: int) -> None:
    if (max_tokens is None) == (rows is None):
        raise UserError(f"exactly one of max_tokens and rows must be given, got {max_tokens} and {rows}")
    given = {"dp_size": dp_size, "max_tokens": max_tokens, "rows": rows, "multiple_of": multiple_of}
    for name, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    negative = [row for row, length in enumerate(lengths) if length < 0]
    if negative:
        raise UserError(f"row {negative[0]} has length {lengths[negative[0]]}")


def _common_count(needed: Sequence[int], multiple_of: int) -> int:
    """Micro-batches of every rank, where each rank needs so many."""
    return ceil(max(1, *needed) / multiple_of) * multiple_of


def _cut(numbers: list[int], rows: int, count: int) -> list[list[int]]:
    """`count` pieces of at most `rows` rows: full ones and a rest, or equal ones where those are too few."""
    if ceil(len(numbers) / rows) == count:
        return [numbers[i : i + rows] for i in range(0, len(numbers), rows)]
    size, larger = divmod(len(numbers), count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [numbers[start:stop] for start, stop in pairwise(starts)]


def _longest_first(rows: Sequence[_Row]) -> list[_Row]:
    return sorted(rows, key=lambda row: (-row.tokens, row.number))


def _lightest(bins: Sequence[_Bin]) -> _Bin:
    """The first bin with the least work, and among equals with the fewest rows."""
    return min(bins, key=lambda bin_: (bin_.work, len(bin_.rows)))


def _deal(rows: list[_Row], dp_size: int) -> list[_Bin]:
    """The rows of each rank: longest first, each to the rank with the least work that has room."""
    size, larger = divmod(len(rows), dp_size)  # so many ranks may take one row more
    shares = [_Bin() for _ in range(dp_size)]
    for row in _longest_first(rows):
        room = size + 1 if sum(len(share.rows) > size for share in shares) < larger else size
        _lightest([share for share in shares if len(share.rows) < room]).add(row)
    return shares


def _pack(shares: list[_Bin], max_tokens: int, multiple_of: int) -> list[list[_Bin]]:
    """Micro-batches of each share within the budget, the same number everywhere, heaviest first."""
    tight = [_first_fit(share.rows, max_tokens) for share in shares]
    count = _common_count([len(bins) for bins in tight], multiple_of)
    packed = []
    for share, bins in zip(shares, tight, strict=True):
        # Where the even packing does not fit, the tight one does, and halving its bins keeps the budget.
        even = _spread(share.rows, count, max_tokens) or _halve(bins, count)
        packed.append(sorted(even, key=lambda bin_: (-bin_.work, not bin_.rows, bin_.numbers)))
    return packed


def _first_fit(rows: Sequence[_Row], max_tokens: int) -> list[_Bin]:
    """First-fit decreasing: few bins, at most 11/9 of the fewest possible and one (Johnson 1973)."""
    bins: list[_Bin] = []
    for row in _longest_first(rows):
        fitting = next((bin_ for bin_ in bins if bin_.fits(row, max_tokens)), None)
        if fitting is None:
            bins.append(fitting := _Bin())
        fitting.add(row)
    return bins


def _spread(rows: Sequence[_Row], count: int, max_tokens: int) -> list[_Bin] | None:
    """Exactly `count` bins of even work, or None if longest-first does not fit into them.

    None is empty if there are as many rows.
    """
    bins = [_Bin() for _ in range(count)]
    for row in _longest_first(rows):
        fitting = [bin_ for bin_ in bins if bin_.fits(row, max_tokens)]
        if not fitting:
            return None
        _lightest(fitting).add(row)
    return bins


def _halve(bins: list[_Bin], count: int) -> list[_Bin]:
    """Cut the heaviest bin that has two rows or more in two, until there are `count`; empty bins make up the rest."""
    bins = list(bins)
    while len(bins) < count:
        several = [bin_ for bin_ in bins if len(bin_.rows) > 1]
        if not several:
            return bins + [_Bin() for _ in range(count - len(bins))]
        heaviest = max(several, key=lambda bin_: bin_.work)
        bins.remove(heaviest)
        halves = [_Bin(), _Bin()]
        for row in _longest_first(heaviest.rows):
            _lightest(halves).add(row)
        bins += halves
    return bins
