"""A short name for a value, by which ranks compare what they hold without sending it."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.errors import UserError


def digest(value: Any) -> str:
    """Equal for values of equal types and contents, in whatever process; the order of dicts and sets does not matter.

    A container that contains itself says there how many levels up it stands.

    Raises ValueError for a value that cannot be pickled, or is nested too deeply for it.
    """
    try:
        return hashlib.sha256(_bytes_of(value)).hexdigest()[:16]
    except RecursionError:
        raise UserError("cannot be pickled: it is nested too deeply") from None
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as refused:  # all are what pickle raises
        raise UserError(f"cannot be pickled: {refused}") from refused


def _bytes_of(value: Any, inside: tuple[int, ...] = ()) -> bytes:
    """The bytes that are summed up; `inside` are the ids of the containers around the value, the outermost first."""
    if id(value) in inside:
        return f"{len(inside) - inside.index(id(value))} up".encode()
    inside += (id(value),)
    kind = f"{type(value).__qualname__}:".encode()
    if isinstance(value, Tensor):
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return kind + _joined([f"{value.dtype}{list(value.shape)}".encode(), dense.view(torch.uint8).numpy().tobytes()])
    if isinstance(value, np.ndarray) and value.dtype == object:
        return kind + _joined([str(value.shape).encode(), *(_bytes_of(entry, inside) for entry in value.flat)])
    if isinstance(value, Mapping):
        return kind + _joined(
            sorted(_joined([_bytes_of(key), _bytes_of(entry, inside)]) for key, entry in value.items())
        )
    if isinstance(value, set | frozenset):
        return kind + _joined(sorted(map(_bytes_of, value)))
    if isinstance(value, list | tuple):
        return kind + _joined([_bytes_of(entry, inside) for entry in value])
    return kind + _pickled(value)


def _joined(parts: list[bytes]) -> bytes:
    """The parts, each with its length, so that no two lists become one."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _pickled(value: Any) -> bytes:
    """The pickle that does not tell whether equal parts of a value are one object."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()
