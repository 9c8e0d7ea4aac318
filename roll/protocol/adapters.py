"""A batch in the form of others: verl's DataProto, and a TensorDict. A plain dict is `to_dict`, `from_single_dict`.

Tensors are shared, objects too, meta data is copied. What the other form has no place for stays behind: the micro-batch
plan and the normalizers, which belong to one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tensordict import TensorDict

from roll.errors import UserError
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


def from_tensordict(batch: TensorDict, meta_info: Mapping[str, Any] | None = None) -> DataProto:
    """The batch that `parts_of_tensordict` finds in a TensorDict; raises what it raises."""
    return DataProto.from_tensordict(batch, meta_info)
