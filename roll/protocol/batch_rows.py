"""The operations on the rows of a batch: which are taken, in which order and how often.

All fields go the same way. Plan and normalizers speak of the rows as they were, so they are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from torch import Tensor

from roll.errors import UserError
from roll.protocol import row_order
from roll.protocol.batch_data import BatchData
from roll.protocol.field_names import known
from roll.protocol.metrics import METRICS
from roll.protocol.rows import (
    RowIndex,
    Rows,
    cut_rows,
    fold_columns,
    repeat_rows,
    resolve_rows,
    take_rows,
    tile_rows,
)


class BatchRows(BatchData):
    """A batch whose rows are taken, cut into pieces, repeated, ordered and grouped."""

    def __iter__(self) -> Iterator[Self]:
        return (self[row] for row in range(len(self)))

    # --- taking rows --------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str) -> Any: ...
    @overload
    def __getitem__(self, index: RowIndex) -> Self: ...
    def __getitem__(self, index: str | RowIndex) -> Any:
        """A field by name (tensor or object array), or rows by number, slice, list, array or mask as a batch.

        Raises UnknownName, a KeyError, for an unknown name, IndexError for a row that does not exist, ValueError or
        TypeError for what names no rows; `data[0, 1]` is among it, since arrays have another meaning for it.
        """
        if isinstance(index, tuple):
            raise TypeError(f"rows are given as a list: [{list(index)}], not [{', '.join(map(repr, index))}]")
        if isinstance(index, str):
            fields = self.to_dict()
            return fields[known(index, fields)[0]]
        return self._take(resolve_rows(index, len(self)))

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | Tensor) -> Self:
        """These rows in this order, by number or by mask; what `data[idxs]` gives, and raises."""
        return self._take(resolve_rows(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """`data[start:end:step]`."""
        return self._take(slice(start, end, step))

    def reorder(self, indices: Sequence[int] | np.ndarray | Tensor) -> Self:
        """All rows in another order: row `indices[i]` comes to place i.

        Raises ValueError unless each row stands in `indices` once.
        """
        rows = resolve_rows(indices, len(self))
        if not isinstance(rows, Tensor):
            raise UserError(f"reorder needs a list or an array of row numbers, got {indices!r}")
        row_order.check_permutation(rows, len(self))
        return self._take(rows)

    def unpad(self, pad_size: int) -> Self:
        """Without the last `pad_size` rows. Raises ValueError if there are not so many."""
        row_order.check_count(pad_size, 0, "unpad needs a number of rows")
        if pad_size > len(self):
            raise UserError(f"unpad of {pad_size} rows from a batch of {len(self)} rows")
        return self.slice(0, len(self) - pad_size)

    # --- more rows ----------------------------------------------------------------------------------------------------

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: 0 0 1 1 with `interleave`, else 0 1 0 1. Raises ValueError below 0."""
        row_order.check_count(repeat_times, 0, "repeat needs a number of times")
        change = repeat_rows if interleave else tile_rows
        return self._with_rows(len(self) * repeat_times, lambda values: change(values, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Row i `repeat_times[i]` times: 0 0 0 1 2 2. Raises ValueError unless it is one number for each row."""
        counts = row_order.check_counts(repeat_times, len(self))
        return self._take(torch.from_numpy(np.repeat(np.arange(len(self)), counts)))

    def unfold_column_chunks(self, n_split: int, split_keys: str | Iterable[str] | None = None) -> Self:
        """Each row as `n_split` rows: of the fields `split_keys` a part of the columns each, all others as they are.

        Raises UnknownName, a KeyError, for an unknown name, and ValueError for columns that do not divide.
        """
        row_order.check_count(n_split, 1, "unfold_column_chunks needs a number of parts")
        fields = self.to_dict()
        cut = known(split_keys or (), fields)
        changed = {
            name: fold_columns(values, n_split, name) if name in cut else repeat_rows(values, n_split)
            for name, values in fields.items()
        }
        return self._of_fields(changed, len(self) * n_split)

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last", ""] = "") -> Self:
        """With `padding_size` copies of the last row at the end, or of the first. `unpad` undoes it.

        Raises ValueError for another candidate, less than 0 rows, or a batch without a row to copy.
        """
        row_order.check_count(padding_size, 0, "padding needs a number of rows")
        if padding_candidate not in ("first", "last", ""):
            raise UserError(f"padding_candidate must be first or last, got {padding_candidate!r}")
        if padding_size and not len(self):
            raise UserError(f"padding of {padding_size} rows for a batch that has none to copy")
        copied = 0 if padding_candidate == "first" else len(self) - 1
        return self.select_idxs([*range(len(self)), *[copied] * padding_size])

    def pad_to_divisor(self, size_divisor: int) -> tuple[Self, int]:
        """(the rows, and as many of them again from the first on as lack to a multiple of `size_divisor`; how many).

        `padded.unpad(pad_size)` undoes it. Raises ValueError if `size_divisor` is below 1.
        """
        pad_size = row_order.num_padding_rows(len(self), size_divisor)
        return self._take(torch.arange(len(self) + pad_size) % max(len(self), 1)), pad_size

    # --- pieces -------------------------------------------------------------------------------------------------------

    def chunk(self, chunks: int) -> list[Self]:
        """Consecutive pieces whose sizes differ by one at most, the larger first; empty ones when rows are too few.

        Raises ValueError for less than one chunk.
        """
        return self._cut(row_order.chunk_bounds(len(self), chunks))

    def split(self, split_size: int) -> list[Self]:
        """Consecutive pieces of `split_size` rows, the last perhaps smaller; an empty batch is one empty piece.

        Raises ValueError for pieces of less than one row.
        """
        return self._cut(row_order.split_bounds(len(self), split_size))

    def group_by(self, keys: str | Iterable[str]) -> dict[Hashable, Self]:
        """The rows of each value of a field, or of each tuple of values of several, in order of first appearance.

        Values are Python values: of an object field as they are, of a tensor [B] as numbers.

        Raises UnknownName, a KeyError, for an unknown name; ValueError for no name, a tensor that is not [B], a value
        that cannot be hashed, or NaN.
        """
        fields = self.to_dict()
        groups = row_order.rows_by_value({name: fields[name] for name in known(keys, fields)})
        return dict(zip(groups, self._pieces(resolve_rows(rows, len(self)) for rows in groups.values()), strict=True))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int = 1,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of all rows, `epochs` times: in order, or in an order drawn anew each epoch from `seed`.

        The same seed gives the same orders, so vary it from step to step. `dataloader_kwargs={"shuffle": False}` keeps
        the order in spite of a seed, as ROLL and verl do without `shuffle`.

        Raises ValueError, at once, when the rows are not a multiple of `mini_batch_size`, for `shuffle` without a seed,
        and for another entry of `dataloader_kwargs`.
        """
        drawn = row_order.draws_order(seed, dataloader_kwargs)
        return self._pieces(row_order.mini_batch_rows(len(self), mini_batch_size, epochs, seed if drawn else None))

    # --- how it is done -----------------------------------------------------------------------------------------------

    def _take(self, rows: Rows) -> Self:
        """Rows that exist."""
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        return self._with_rows(count, lambda values: take_rows(values, rows))

    def _with_rows(self, num_rows: int, change: Callable[[Any], Any]) -> Self:
        """Every field changed to `num_rows` rows in the same way."""
        self._check_lengths()
        return self._of_fields({name: change(values) for name, values in self.to_dict().items()}, num_rows)

    def _of_fields(self, fields: Mapping[str, Any], num_rows: int) -> Self:
        """The fields of this batch with other values, and `num_rows` rows."""
        tensors = {name: fields[name] for name in self.tensors}
        return self._like(tensors, {name: fields[name] for name in self.non_tensor_batch}, num_rows)

    def _cut(self, bounds: Sequence[tuple[int, int]]) -> list[Self]:
        """Consecutive pieces of all rows; the first keeps the metrics, so that they are joined only once."""
        self._check_lengths()
        fields = {name: cut_rows(values, bounds) for name, values in self.to_dict().items()}
        pieces = []
        for number, (begin, end) in enumerate(bounds):
            piece = self._of_fields({name: parts[number] for name, parts in fields.items()}, end - begin)
            pieces.append(_without_metrics(piece) if number else piece)
        return pieces

    def _pieces(self, taken: Iterable[Rows]) -> Iterator[Self]:
        """Rows after rows, as they are asked for; the first keeps the metrics, as in `_cut`."""
        for number, rows in enumerate(taken):
            piece = self._take(rows)
            yield _without_metrics(piece) if number else piece


def _without_metrics(piece: Any) -> Any:
    """The same piece, which is new and nobody's yet."""
    piece.meta_info.pop(METRICS, None)
    return piece
