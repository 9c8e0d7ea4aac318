"""A batch in the form of others: verl's DataProto, and a TensorDict. A plain dict is `to_dict`, `from_single_dict`.

Tensors are shared, objects too, meta data is copied. What the other form has no place for stays behind: the micro-batch
plan and the normalizers, which belong to one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict

from roll.errors import UserError
from roll.protocol import joining
from roll.protocol.data_proto import DataProto
from roll.protocol.tensors import tensor_dict

BatchT = TypeVar("BatchT")


class BatchLike(Protocol):
    """What verl's DataProto (and ROLL's) looks like from outside."""

    batch: Any
    non_tensor_batch: Any
    meta_info: Any


def from_verl(other: BatchLike) -> DataProto:
    """The same batch as ours; `other` is verl's DataProto, or looks like it.

    Arrays of numbers become object arrays, arrays [B, n, ...] one array for each row. Metrics
    become lists of values.

    Raises ValueError for what is no batch here: nested (jagged) tensors, fields of different lengths.
    """
    missing = [name for name in ("batch", "non_tensor_batch", "meta_info") if not hasattr(other, name)]
    if missing:
        raise UserError(f"a {type(other).__name__} is not like verl's DataProto: it has no {', '.join(missing)}")
    meta = dict(other.meta_info or {})
    tensors = None if other.batch is None else dict(other.batch.items())
    objects = dict(other.non_tensor_batch or {})
    if tensors is None:
        return DataProto(None, objects, meta)
    if not tensors:  # rows without a tensor: their number is all that there is
        return DataProto(TensorDict({}, batch_size=other.batch.batch_size, device=other.batch.device), objects, meta)
    made = DataProto.from_dict(tensors, objects, meta)
    return replace(made, batch=tensor_dict(tensors, len(made), other.batch.device))


def to_verl(data: DataProto, make: Callable[..., BatchT]) -> BatchT:
    """The same batch as `make(batch=, non_tensor_batch=, meta_info=)` builds it; `make` is verl's class `DataProto`."""
    own = replace(data)  # others change their batches in place
    return make(batch=own.batch, non_tensor_batch=dict(own.non_tensor_batch), meta_info=own.meta_info)


def to_tensordict(data: DataProto) -> TensorDict:
    """Tensors as they are, objects as `NonTensorStack` (one entry for each row), `meta_info` as `NonTensorData`.

    Raises ValueError when a field and an entry of meta_info share a name, or there are no rows to speak of (a stub).
    """
    if data.batch is None and not data.non_tensor_batch:
        raise UserError("a stub has no rows, so it cannot be a TensorDict")
    both = sorted(name for name in data.meta_info if name in data)
    if both:
        raise UserError(f"{', '.join(both)}: a field and an entry of meta_info; a TensorDict has one name for both")
    size = [len(data)]
    meta = DataProto(meta_info=data.meta_info).meta_info
    entries: dict[str, Any] = dict(data.tensors)
    entries |= {name: _stack(values) for name, values in data.non_tensor_batch.items()}
    entries |= {name: NonTensorData(value, batch_size=size) for name, value in meta.items()}
    return TensorDict(entries, batch_size=size, device=None if data.batch is None else data.batch.device)


def from_tensordict(batch: TensorDict, meta_info: Mapping[str, Any] | None = None) -> DataProto:
    """Tensors, `NonTensorStack` as objects, `NonTensorData` (one value for all rows) as entries of `meta_info`.

    A TensorDict makes a stack of a list, and one value of an array of objects, whatever its length.

    Args:
        batch: with one batch dimension [B].
        meta_info: more entries.

    Raises ValueError for nested TensorDicts, or an entry that is also in `meta_info` with another value.
    """
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for name in map(str, batch.keys()):
        value = batch.get(name)
        if isinstance(value, NonTensorStack):
            objects[name] = value.tolist()
        elif isinstance(value, NonTensorData) and isinstance(value.data, NoRows):
            objects[name] = []
        elif isinstance(value, NonTensorData):
            meta[name] = value.data
        else:
            tensors[name] = value
    both = joining.merged(meta, meta_info or {}, "meta_info")
    return DataProto(TensorDict(tensors, batch_size=batch.batch_size, device=batch.device), objects, both)


@dataclass(frozen=True)
class NoRows:
    """Stands for an object field without rows: a stack of none cannot be made in every version of tensordict."""


def _stack(values: np.ndarray) -> NonTensorStack | NonTensorData:
    """One entry for each row."""
    if len(values) == 0:
        return NonTensorData(NoRows(), batch_size=[0])
    return NonTensorStack(*(NonTensorData(value) for value in values))
