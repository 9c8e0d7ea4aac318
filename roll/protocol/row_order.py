"""Which rows go where: the arithmetic of cutting, repeating, padding, ordering and grouping rows.

Functions of row numbers alone, so that they hold for every kind of field.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import UserError


def check_count(value: object, least: int, what: str) -> None:
    """Raise ValueError, which says of `what`, unless this is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{what} of at least {least}, got {value!r}")


def chunk_bounds(num_rows: int, chunks: int) -> list[tuple[int, int]]:
    """(begin, end) of consecutive pieces whose sizes differ by one at most, the larger first."""
    check_count(chunks, 1, "chunk needs a number of chunks")
    size, larger = divmod(num_rows, chunks)
    ends = [(i + 1) * size + min(i + 1, larger) for i in range(chunks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def split_bounds(num_rows: int, size: int) -> list[tuple[int, int]]:
    """(begin, end) of consecutive pieces of `size` rows, the last perhaps smaller; no rows are one empty piece."""
    check_count(size, 1, "split needs a number of rows")
    return [(begin, min(begin + size, num_rows)) for begin in range(0, max(num_rows, 1), size)]


def num_padding_rows(num_rows: int, divisor: int) -> int:
    """Rows that lack to a multiple of `divisor`."""
    check_count(divisor, 1, "pad_to_divisor needs a divisor")
    return -num_rows % divisor


def check_counts(values: Sequence[int] | np.ndarray | Tensor, num_rows: int) -> np.ndarray:
    """How often each row is taken. Raises ValueError unless it is one integer of at least 0 for each row."""
    counts = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if counts.shape != (num_rows,) or (num_rows and counts.dtype.kind not in "iu") or (counts < 0).any():
        raise UserError(f"sample_level_repeat needs {num_rows} numbers of at least 0, got {values!r}")
    return counts.astype(np.int64)


def draws_order(seed: int | None, dataloader_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether mini-batches come in an order that is drawn: where there is a seed, unless `shuffle` says otherwise.

    Raises ValueError for another entry of `dataloader_kwargs`, and for `shuffle` without a seed.
    """
    others = {name: value for name, value in (dataloader_kwargs or {}).items() if name != "shuffle"}
    if others:
        raise UserError(
            f"make_iterator takes shuffle of dataloader_kwargs, got {others}; for the rest there is "
            "torch.utils.data.DataLoader(data, collate_fn=roll.protocol.collate_fn, ...)"
        )
    shuffle = (dataloader_kwargs or {}).get("shuffle", seed is not None)
    if shuffle and seed is None:
        raise UserError("make_iterator: shuffle needs a seed, from which the orders are drawn")
    return bool(shuffle)


def mini_batch_rows(num_rows: int, size: int, epochs: int, seed: int | None) -> Iterator[Tensor]:
    """The rows of each mini-batch, `epochs` times all rows; what is wrong is raised at once, not when it is read."""
    check_count(size, 1, "make_iterator needs a mini_batch_size")
    check_count(epochs, 0, "make_iterator needs a number of epochs")
    if num_rows % size:
        raise UserError(f"{num_rows} rows are not a multiple of mini_batch_size {size}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)

    def mini_batches() -> Iterator[Tensor]:
        for _ in range(epochs if num_rows else 0):
            order = torch.arange(num_rows) if generator is None else torch.randperm(num_rows, generator=generator)
            yield from order.split(size)

    return mini_batches()


def check_permutation(rows: Tensor, num_rows: int) -> None:
    """Refuse what does not name every row once; `rows` are row numbers within the batch."""
    count = np.bincount(rows.numpy(), minlength=num_rows)
    wrong = (count != 1).nonzero()[0]
    if len(wrong):
        row = wrong[0]
        raise UserError(
            f"reorder needs each of {num_rows} rows once; row {row} stands {int(count[row])} times "
            "(select_idxs takes any rows)"
        )


def rows_by_value(columns: Mapping[str, Tensor | np.ndarray]) -> dict[Hashable, list[int]]:
    """The rows of each value, in the order of first appearance; of each tuple of values, if there are several columns.

    Raises ValueError for no column, a column that is not [B], a value that cannot be hashed, and NaN, which is equal to
    nothing, not even itself.
    """
    if not columns:
        raise UserError("group_by needs at least one name")
    for name, column in columns.items():
        if column.ndim != 1:
            raise UserError(f"group_by: {name} must have one value for each row, got {list(column.shape)}")
    groups: dict[Hashable, list[int]] = {}
    for row, values in enumerate(zip(*(column.tolist() for column in columns.values()), strict=True)):
        for name, value in zip(columns, values, strict=True):
            try:
                hash(value)
            except TypeError as refused:
                raise UserError(f"group_by: row {row} of {name} is {value!r}, which cannot be hashed") from refused
            if value != value:
                raise UserError(f"group_by: row {row} of {name} is NaN, which is equal to nothing")
        groups.setdefault(values[0] if len(columns) == 1 else values, []).append(row)
    return groups
