"""Several batches become one: rows after rows (`concat`), or fields beside fields (`union`).

These are the rules for names, values and meta data; they work on dicts, `DataProto` applies them.

`meta_info` must be the same in all pieces, except for its entry `metrics` (see `roll.protocol.metrics`) and the entries
that the caller names. Joining pieces lists the values of all pieces in their order, also of a name that only some
pieces have, and a single piece is joined like many. Of the pieces that one call makes of a batch (`chunk`, `split`,
`group_by`, `make_iterator`) only the first has its metrics, so that joined again they are counted once. Rows that are
taken one call at a time (`data[:2]`, `select_idxs`) have them each time: that they will be joined is not known then.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.errors import UserError
from roll.protocol.display import describe_value, short
from roll.protocol.equality import NotComparable, same_value
from roll.protocol.metrics import METRICS, PLAIN, joined_metrics, listed_metrics, without_metrics

T = TypeVar("T")

UNCOPYABLE = (TypeError, RuntimeError, AttributeError, copy.Error, pickle.PickleError)
"""Errors of `copy.deepcopy`: a lock, a generator or a module is a TypeError, a tensor inside a graph a RuntimeError."""


def own_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `meta_info` that shares nothing with it, every metric as a list.

    Raises ValueError if `meta` or its `metrics` is no dict, or an entry cannot be copied.
    """
    if not isinstance(meta, Mapping):
        raise UserError(f"meta_info must be a dict, got {type(meta).__name__}")
    own = {name: own_copy(value, f"meta_info {name}") for name, value in meta.items() if name != METRICS}
    if meta.get(METRICS) is not None:
        own[METRICS] = listed_metrics(meta[METRICS])
    return own


def own_copy(value: Any, what: str) -> Any:
    """A deep copy. Raises ValueError, which says of `what`, if the value has none: a lock, a file, no end."""
    if isinstance(value, PLAIN):
        return value
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise UserError(f"{what} cannot be copied: nested too deeply, or an array that contains itself") from None
    except UNCOPYABLE as error:
        raise UserError(f"{what} cannot be copied: {error}") from error


def concat_metas(metas: Sequence[Mapping[str, Any]], global_keys: Collection[str] = ()) -> dict[str, Any]:
    """The `meta_info` of pieces that are joined, with the values of all pieces for metrics and each of `global_keys`.

    Raises ValueError where the pieces differ in another entry.
    """
    joined = {METRICS, *global_keys}
    first, *others = [{name: value for name, value in meta.items() if name not in joined} for meta in metas]
    way_out = "; global_keys lists the values of all pieces, select(meta_info_keys=...) leaves entries out"
    for number, other in enumerate(others, start=1):
        _check_same_names(first, other, number, way_out)
        for name, value in first.items():
            if not _same(value, other[name], f"concat: meta_info {name}"):
                here, there = short(value), short(other[name])
                raise UserError(f"concat: meta_info {name} is {here} in piece 0, {there} in piece {number}{way_out}")
    measured = [own_meta({METRICS: meta[METRICS]}) for meta in metas if METRICS in meta]
    return {**own_meta(first), **gathered_entries(metas, global_keys), **joined_metrics(measured)}


def gathered_entries(metas: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, Any]:
    """Entries of `meta_info` as lists of the values of all pieces that have them: one value per piece, whatever it is.

    A dict becomes a dict of such lists. Metrics are not among them (`joined_metrics`).
    """
    chosen = [{name: meta[name] for name in meta if name in names and name != METRICS} for meta in metas]
    return _gathered(chosen)


def _gathered(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, value in piece.items():
            found.setdefault(name, []).append(value)
    gathered: dict[str, Any] = {}
    for name, values in found.items():
        try:
            dicts = all(isinstance(value, Mapping) for value in values)
            gathered[name] = _gathered(values) if dicts else [own_copy(value, f"meta_info {name}") for value in values]
        except RecursionError:
            raise UserError(f"concat: meta_info {name} is nested too deeply, or contains itself") from None
    return gathered


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
    raise UserError(f"concat: {name} is {here} in piece 0, {there} in piece {number}")


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
    """The entries of both. Raises ValueError, which says of `what`, if a name has different values in the two."""
    for name in ours.keys() & theirs.keys():
        if not _same(ours[name], theirs[name], f"union: {name} of {what}"):
            raise UserError(f"union: {what} has different values of {name}")
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
        raise UserError(f"union: {what} is {ours} and {theirs}")
    return theirs if ours is None else ours


def _same(ours: Any, theirs: Any, what: str) -> bool:
    try:
        return same_value(ours, theirs)
    except NotComparable as refused:
        raise NotComparable(f"{what}: {refused}") from refused


def _check_same_names(first: Mapping[str, Any], piece: Mapping[str, Any], number: int, way_out: str = "") -> None:
    if first.keys() != piece.keys():
        differing = ", ".join(sorted(first.keys() ^ piece.keys()))
        raise UserError(f"concat: {differing} is not in both piece 0 and piece {number}{way_out}")
