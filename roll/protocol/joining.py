"""Several batches become one: rows after rows (`concat`), or fields beside fields (`union`).

These are the rules for names, values and meta data; they work on dicts, `DataProto` applies them.

`meta_info` must be the same in all pieces, except for its entry `metrics`, which holds measurements: names, each with
a list of values (a single value is a list of one). Joining pieces lists the values of all pieces in their order, also
of a name that only some pieces have, and a single piece is joined like many. Of the pieces that one call makes of a
batch (`chunk`, `split`, `group_by`, `make_iterator`) only the first has its metrics, so that joined again they are
counted once. Rows that are taken one call at a time (`data[:2]`, `select_idxs`) have them each time: that they will be
joined is not known then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.protocol.display import describe_value

METRICS = "metrics"

_IMMUTABLE = (int, float, str, bool, type(None))  # nothing to copy, and most of what there is

T = TypeVar("T")


def own_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `meta_info` that shares nothing with it, every metric as a list.

    Raises ValueError if `metrics` is no dict.
    """
    own = {name: v if isinstance(v, _IMMUTABLE) else copy.deepcopy(v) for name, v in meta.items()}
    if METRICS in own:
        own[METRICS] = listed_metrics(own[METRICS])
    return own


def listed_metrics(metrics: Any) -> dict[str, list[Any]]:
    """For each name the list of its values. Raises ValueError if `metrics` is no dict."""
    if not isinstance(metrics, Mapping):
        raise ValueError(f"meta_info metrics must be a dict of names and values, got {metrics!r}")
    return {name: list(value) if isinstance(value, list | tuple) else [value] for name, value in metrics.items()}


def without_metrics(meta: Mapping[str, Any]) -> dict[str, Any]:
    """All entries but the metrics."""
    return {name: value for name, value in meta.items() if name != METRICS}


def concat_metas(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `meta_info` of pieces that are joined. Raises ValueError where they differ in more than metrics."""
    first = without_metrics(metas[0])
    for number, meta in enumerate(metas[1:], start=1):
        other = without_metrics(meta)
        _check_same_names(first, other, number)
        for name, value in first.items():
            if not compared(value, other[name], f"concat: meta_info {name}"):
                raise ValueError(f"concat: meta_info {name} is {value!r} in piece 0, {other[name]!r} in piece {number}")
    measured = [listed_metrics(meta[METRICS]) for meta in metas if METRICS in meta]
    return own_meta({**first, METRICS: concat_metrics(measured)} if measured else first)


def concat_metrics(pieces: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, list[Any]]:
    """For each name, in the order of first appearance, the values of all pieces."""
    joined: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in piece.items():
            joined.setdefault(name, []).extend(values)
    return joined


def concat_tensors(pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Rows after rows. Raises ValueError if pieces differ in names, dtypes, devices or the shape of a row."""
    for number, piece in enumerate(pieces):
        _check_same_names(pieces[0], piece, number)
    return {name: _concat_column(name, [piece[name] for piece in pieces]) for name in pieces[0]}


def _concat_column(name: str, column: list[Tensor]) -> Tensor:
    """One field of all pieces. torch.cat is left to compare shapes and devices, for looking costs as much as joining.

    It would promote dtypes, and take an empty vector for rows of any shape, so these are compared here.
    """
    dtype, ndim = column[0].dtype, column[0].ndim
    if all(tensor.dtype is dtype and tensor.ndim == ndim for tensor in column):
        try:
            return torch.cat(column)
        except RuntimeError:
            number = _first_other(column)
            if number is None:
                raise
    else:
        number = _first_other(column)
        assert number is not None
    here, there = describe_value(column[0]), describe_value(column[number])
    raise ValueError(f"concat: {name} is {here} in piece 0, {there} in piece {number}")


def _first_other(column: list[Tensor]) -> int | None:
    """The first piece whose dtype, shape of a row or device is not that of piece 0."""
    kinds = [(tensor.dtype, tensor.shape[1:], tensor.device) for tensor in column]
    return next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)


def concat_arrays(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows after rows. Raises ValueError if pieces differ in names."""
    for number, piece in enumerate(pieces):
        _check_same_names(pieces[0], piece, number)
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def merged(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The entries of both.

    Raises ValueError, which says of `what`, if a name has different values in the two, or values that
    cannot be compared.
    """
    for name in ours.keys() & theirs.keys():
        if not compared(ours[name], theirs[name], f"union: {what} {name}"):
            raise ValueError(f"union: {what} has different values of {name}")
    return {**ours, **theirs}


def merged_metas(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta_info` of both; metrics are merged name by name, by the same rule as everything else."""
    ours, theirs = own_meta(ours), own_meta(theirs)
    both = merged(without_metrics(ours), without_metrics(theirs), "meta_info")
    if METRICS in ours or METRICS in theirs:
        both[METRICS] = merged(ours.get(METRICS, {}), theirs.get(METRICS, {}), "meta_info metrics")
    return both


def either(ours: T | None, theirs: T | None, what: str) -> T | None:
    """The one that is there. Raises ValueError if there are two that differ."""
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(f"union: {what} is {ours} and {theirs}")
    return theirs if ours is None else ours


def compared(a: Any, b: Any, where: str) -> bool:
    """`same_value`. Raises ValueError that begins with `where`, if the values' own `==` raises."""
    try:
        return same_value(a, b)
    except Exception as error:
        raise ValueError(f"{where} cannot be compared: {type(error).__name__}: {error}") from error


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same through and through: dtypes, shapes and entries; NaN is NaN, 1 is no True."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return all(same_value(x, y) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Tensor | np.ndarray) or isinstance(b, Tensor | np.ndarray):
        return False
    if isinstance(a, bool | np.bool_) != isinstance(b, bool | np.bool_):
        return False
    return bool(a == b) or bool(a != a and b != b)


def _check_same_names(first: Mapping[str, Any], piece: Mapping[str, Any], number: int) -> None:
    if first.keys() != piece.keys():
        differing = ", ".join(sorted(first.keys() ^ piece.keys()))
        raise ValueError(f"concat: {differing} is not in both piece 0 and piece {number}")
