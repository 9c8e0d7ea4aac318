"""The measurements that travel with a batch: the entry `metrics` of its meta_info.

Each name has a flat list of numbers, whatever was given for it: a number, a tensor or an array of any shape, a list of
these. A dict of more names is joined name by name, and a list of dicts (verl) is joined like the pieces of a batch:

    [{"loss": 0.5, "actor": {"kl": np.array([1.0, 2.0])}}, {"loss": torch.tensor(0.25)}]
    {"loss": [0.5, 0.25], "actor": {"kl": [1.0, 2.0]}}
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from roll.errors import UserError
from roll.protocol.display import short

METRICS = "metrics"

PLAIN = (int, float, str, bool, type(None))
"""Types with nothing to copy and nothing to take apart."""


def listed_metrics(metrics: Any) -> dict[str, Any]:
    """For each name the flat list of its values, or its own names. Raises ValueError if `metrics` is no dict."""
    pieces = metrics if isinstance(metrics, list | tuple) else [{} if metrics is None else metrics]
    if not all(isinstance(piece, Mapping) for piece in pieces):
        raise UserError(f"meta_info metrics must be a dict of names and values, got {short(metrics)}")
    return joined_metrics(pieces)


def joined_metrics(pieces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """For each name, in the order of first appearance, the values of all pieces.

    Raises ValueError if a name has values here and more names there, or its values are nested without end.
    """
    found: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, value in piece.items():
            found.setdefault(name, []).append(value)
    return {name: _joined(name, values) for name, values in found.items()}


def _joined(name: str, values: list[Any]) -> Any:
    """The values that all pieces have for one name."""
    try:
        lists = [value if isinstance(value, list | tuple) else [value] for value in values]
        entries = [entry for entries in lists for entry in entries]
        dicts = [isinstance(entry, Mapping) for entry in entries]
        if entries and all(dicts):
            return joined_metrics(entries)
        if any(dicts):
            raise UserError(f"metrics: {name} has a dict of more names beside values: {short(values)}")
        return _flat(entries)
    except RecursionError:
        raise UserError(f"metrics: {name} is nested too deeply, or contains itself") from None


def _flat(values: Iterable[Any]) -> list[Any]:
    """The numbers in them, one after the other."""
    flat: list[Any] = []
    for value in values:
        if type(value) in PLAIN:
            flat.append(value)
        elif isinstance(value, Tensor):
            flat += value.detach().reshape(-1).tolist()
        elif isinstance(value, np.ndarray):
            entries = value.reshape(-1).tolist()
            flat += _flat(entries) if value.dtype == object else entries
        elif isinstance(value, np.generic):
            flat.append(value.item())
        elif isinstance(value, list | tuple):
            flat += _flat(value)
        else:
            flat.append(copy.deepcopy(value))
    return flat


def without_metrics(meta: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of a `meta_info` but the metrics."""
    return {name: value for name, value in meta.items() if name != METRICS}
