"""Whether two values of a batch are the same through and through: entries of meta_info, objects of a row, tensors.

Values are walked with a list of pairs that are still to be compared, not by recursion, so nesting may be of any depth.
A pair of containers is compared once: a list or an array that contains itself ends, and is the same as another one if
no walk through the two finds a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from roll.errors import UserError

Pairs = Iterator[tuple[Any, Any]] | bool
"""The parts of two containers, pair by pair; or whether the two are the same, where nothing is left to compare."""


class NotComparable(UserError):
    """Two objects cannot be compared: their `==` raises, or gives something that is neither true nor false."""


def same_value(a: Any, b: Any) -> bool:
    """Whether dtypes, shapes and entries are the same; NaN is NaN, 1 is no True.

    Objects of other classes are compared by their own `==`, dataclasses field by field. Raises NotComparable.
    """
    begun: dict[tuple[int, int], tuple[Any, Any]] = {}  # holds the objects, so that no other takes over their ids
    left = [(a, b)]
    while left:
        a, b = left.pop()
        if a is b or (id(a), id(b)) in begun:
            continue
        parts = _parts(a, b)
        if isinstance(parts, bool):
            if not parts:
                return False
        else:
            begun[id(a), id(b)] = a, b
            left.extend(parts)
    return True


def _parts(a: Any, b: Any) -> Pairs:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return zip(a.flat, b.flat, strict=True) if a.dtype == object else _same_entries(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return ((a[key], b[key]) for key in a.keys()) if set(a.keys()) == set(b.keys()) else False  # noqa: SIM118
    if isinstance(a, list | tuple) and type(a) is type(b):
        return zip(a, b, strict=True) if len(a) == len(b) else False
    if isinstance(a, Tensor | np.ndarray) or isinstance(b, Tensor | np.ndarray):
        return False
    if type(a) is type(b) and getattr(getattr(type(a), "__dataclass_params__", None), "eq", False):
        with suppress(NotComparable):  # a field is a tensor, or contains this object
            if _equal(a, b):
                return True
        return ((getattr(a, part.name), getattr(b, part.name)) for part in fields(a) if part.compare)
    if isinstance(a, bool | np.bool_) != isinstance(b, bool | np.bool_):
        return False
    return _equal(a, b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.layout != b.layout:
        return False
    return a.is_meta or _same_entries(a, b)


def _same_entries(a: Any, b: Any) -> bool:
    """Of two tensors, or two arrays that hold no objects."""
    try:
        return bool(((a == b) | ((a != a) & (b != b))).all())
    except (RuntimeError, TypeError, ValueError) as refused:  # such as nested tensors, and arrays with named columns
        raise NotComparable(f"two {type(a).__name__}s cannot be compared: {refused}") from refused


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception as refused:  # `==` is the user's own and may raise anything
        kinds = " and a ".join(dict.fromkeys(type(value).__name__ for value in (a, b)))
        raise NotComparable(f"a {kinds} cannot be compared: {type(refused).__name__}: {refused}") from refused
