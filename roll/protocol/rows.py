"""Rows of a batch: how they are named (row numbers, slices, masks), and taken out of a tensor or an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import UserError
from roll.protocol.display import short

Rows = slice | Tensor
"""Rows that exist, as `resolve_rows` gives them."""
RowIndex = int | slice | Sequence[int] | Sequence[bool] | np.ndarray | Tensor


def resolve_rows(index: RowIndex, num_rows: int) -> slice | Tensor:
    """The rows that `index` names: a slice as it is, one row as a slice, anything else as int64 row numbers on CPU.

    Negative numbers count from the end. Raises IndexError for a row that does not exist, ValueError for a mask of
    another length, TypeError for what is no row index, or may be a mask as well as row numbers (uint8).
    """
    if isinstance(index, slice):
        return index
    if isinstance(index, int | np.integer) and not isinstance(index, bool):
        row = int(_from_start(np.array([index]), num_rows)[0])
        return slice(row, row + 1)
    if not isinstance(index, list | tuple | range | np.ndarray | Tensor):
        raise TypeError(f"rows are given as number, slice, list, array or mask, not as {type(index).__name__}")
    if isinstance(index, Tensor):
        rows = index.detach().cpu().numpy()
    else:
        rows = np.asarray(index, dtype=None if len(index) or isinstance(index, np.ndarray) else np.int64)
    if rows.ndim == 0 and rows.dtype != bool:
        rows = rows.reshape(1)
    if rows.ndim != 1:
        raise UserError(f"rows must be one-dimensional, got shape {list(rows.shape)}")
    if rows.dtype == bool:
        if len(rows) != num_rows:
            raise UserError(f"a mask of {len(rows)} rows for a batch of {num_rows} rows")
        return torch.from_numpy(rows.nonzero()[0])
    if rows.dtype.kind not in "iu" or rows.dtype == np.uint8:  # PyTorch takes uint8 for a mask, NumPy for numbers
        raise TypeError(f"row numbers must be integers, a mask must be bool; got {rows.dtype}")
    return torch.from_numpy(_from_start(rows.astype(np.int64), num_rows))


def _from_start(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Row numbers that are counted from the start. In NumPy, which is quicker than torch with few numbers."""
    if len(rows) and (rows.min() < -num_rows or rows.max() >= num_rows):
        wrong = rows[(rows < -num_rows) | (rows >= num_rows)][0]
        raise IndexError(f"row {wrong} is outside a batch of {num_rows} rows")
    return np.where(rows < 0, rows + num_rows, rows)


def take_rows(values: Any, index: slice | Tensor) -> Any:
    """Rows of a tensor or an array, as `resolve_rows` names them; a view where `index` is a slice."""
    if isinstance(index, slice):
        return values[index]
    if isinstance(values, Tensor):
        return values.index_select(0, index.to(values.device))  # several times faster than values[index]
    return values[index.numpy()]


def repeat_rows(values: Any, times: int) -> Any:
    """Every row of a tensor or an array `times` times: 0 0 1 1."""
    return values.repeat_interleave(times, dim=0) if isinstance(values, Tensor) else np.repeat(values, times)


def tile_rows(values: Any, times: int) -> Any:
    """All rows of a tensor or an array, `times` times: 0 1 0 1."""
    if isinstance(values, Tensor):
        return torch.cat([values] * times) if times else values[:0]
    return np.tile(values, times)


def fold_columns(values: Any, parts: int, name: str) -> Any:
    """Each row as `parts` rows, of consecutive columns: a tensor [B, C, ...] becomes [B * parts, C / parts, ...].

    Objects are cut where they are sequences of C entries. Raises ValueError if a row cannot be cut into equal parts.
    """
    if isinstance(values, Tensor):
        if values.ndim < 2 or values.shape[1] % parts:
            raise UserError(f"{name} {list(values.shape)} does not divide into {parts} parts of equal columns")
        rows, columns, *rest = values.shape
        return values.reshape(rows * parts, columns // parts, *rest)
    cut = []
    for row, value in enumerate(values):
        if not isinstance(value, list | tuple | np.ndarray | Tensor) or np.ndim(value) == 0 or len(value) % parts:
            raise UserError(f"{name}: row {row} does not divide into {parts} parts of equal length: {short(value)}")
        size = len(value) // parts
        cut += [value[part * size : (part + 1) * size] for part in range(parts)]
    return object_array(cut, name)


def cut_rows(values: Any, bounds: Sequence[tuple[int, int]]) -> Sequence[Any]:
    """The pieces between consecutive bounds of a tensor or an array, as views."""
    if isinstance(values, Tensor):
        return values.split_with_sizes([end - begin for begin, end in bounds])  # one call for all pieces
    return [values[begin:end] for begin, end in bounds]


def object_array(values: Sequence[Any] | np.ndarray, name: str) -> np.ndarray:
    """One Python object for each row: a new object array [B].

    A list stays one object per entry, also where NumPy would read a list of equal lists as a matrix. Raises ValueError
    for a single string and for what has no rows.
    """
    if not isinstance(values, list | tuple) and (not isinstance(values, np.ndarray) or values.ndim == 0):
        raise UserError(f"{name} must be a list or an array with one entry for each row, got {values!r}")
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values.astype(object)
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array
