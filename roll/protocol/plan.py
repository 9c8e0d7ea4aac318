"""Which rows form which micro-batch on which data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Protocol, TypeVar

from roll.errors import UserError


class _Rows(Protocol):
    """A sequence of rows that can be indexed by a list of row numbers: Tensor, ndarray, DataProto."""

    def __len__(self) -> int: ...


RowsT = TypeVar("RowsT", bound=_Rows)


@dataclass(frozen=True)
class MicroBatchPlan:
    """The plan of one batch, made once on the driver and carried by the batch and by each of its shares.

    Example: 5 rows on two ranks, two micro-batches each. Rank 0 holds rows 0, 3, 4 of the batch, first (0, 3), then
    (4); rank 1 holds rows 1, 2 and takes 2 first:

        MicroBatchPlan(rows=((0, 3, 4), (1, 2)), shares=(((0, 1), (2,)), ((1,), (0,))))

    Results that each rank returns in the order of its share, concatenated over the ranks, speak of rows 0 3 4 1 2;
    `restore` brings them back to 0 1 2 3 4.

    A micro-batch may have no rows, so that a rank with few has as many micro-batches as the others.

    Raises ValueError unless every row stands in exactly one micro-batch of one rank, and every rank has the same number
    of micro-batches, at least one.
    """

    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """shares[dp_rank][micro_batch]: row numbers within that rank's share."""
    rows: tuple[tuple[int, ...], ...]
    """rows[dp_rank]: row numbers of the whole batch, in the order in which the share holds them."""

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.shares):
            raise UserError(f"rows for {len(self.rows)} and shares for {len(self.shares)} data-parallel ranks")
        _check_permutation(list(chain(*self.rows)), "the batch")
        for rank, (share, rows) in enumerate(zip(self.shares, self.rows, strict=True)):
            _check_permutation(list(chain(*share)), f"the share of data-parallel rank {rank}", expected=len(rows))
            if len(share) != len(self.shares[0]):
                raise UserError(
                    f"data-parallel rank {rank} has {len(share)} micro-batches, rank 0 has {len(self.shares[0])}"
                )
        if not self.shares[0]:
            raise UserError("a plan needs at least one micro-batch")

    @property
    def dp_size(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        """Rows of the whole batch."""
        return sum(len(rows) for rows in self.rows)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every data-parallel rank."""
        return len(self.shares[0])

    @cached_property
    def restore_order(self) -> tuple[int, ...]:
        """restore_order[i]: where row i of the batch stands in the shares, concatenated in data-parallel order."""
        sent = list(chain(*self.rows))
        return tuple(sorted(range(len(sent)), key=sent.__getitem__))

    def restore(self, values: RowsT) -> RowsT:
        """Results of the shares, concatenated in data-parallel order, in the order of the batch's rows.

        Raises ValueError if `values` (Tensor, ndarray or DataProto) does not have one row for each row of the batch.
        """
        if len(values) != self.num_rows:
            raise UserError(f"{len(values)} rows of results for a plan of {self.num_rows} rows")
        return values[list(self.restore_order)]  # type: ignore[index]


def _check_permutation(rows: list[int], what: str, expected: int | None = None) -> None:
    size = len(rows) if expected is None else expected
    if sorted(rows) != list(range(size)):
        raise UserError(f"{what} must hold each of its rows 0..{size - 1} exactly once, got {rows}")
