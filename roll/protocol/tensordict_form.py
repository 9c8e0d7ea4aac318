"""A batch as one TensorDict, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict

from roll.errors import UserError
from roll.protocol import joining
from roll.protocol.batch_data import BatchData


def to_tensordict(data: BatchData) -> TensorDict:
    """Tensors as they are, objects as `NonTensorStack` (one entry for each row), `meta_info` as `NonTensorData`.

    Raises ValueError when a field and an entry of meta_info share a name, or there are no rows to speak of (a stub).
    """
    if data.batch is None and not data.non_tensor_batch:
        raise UserError("a stub has no rows, so it cannot be a TensorDict")
    both = sorted(name for name in data.meta_info if name in data)
    if both:
        raise UserError(f"{', '.join(both)}: a field and an entry of meta_info; a TensorDict has one name for both")
    size = [len(data)]
    meta = replace(data).meta_info  # a copy
    entries: dict[str, Any] = dict(data.tensors)
    entries |= {name: _stack(values) for name, values in data.non_tensor_batch.items()}
    entries |= {name: NonTensorData(value, batch_size=size) for name, value in meta.items()}
    return TensorDict(entries, batch_size=size, device=None if data.batch is None else data.batch.device)


def parts_of_tensordict(
    batch: TensorDict, meta_info: Mapping[str, Any] | None = None
) -> tuple[TensorDict, dict[str, Any], dict[str, Any]]:
    """Parts of a batch in a TensorDict: its tensors; `NonTensorStack` as objects; `NonTensorData`, one value for all
    rows, as an entry of `meta_info`.

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
    return TensorDict(tensors, batch_size=batch.batch_size, device=batch.device), objects, both


@dataclass(frozen=True)
class NoRows:
    """Stands for an object field without rows: a stack of none cannot be made in every version of tensordict."""


def _stack(values: np.ndarray) -> NonTensorStack | NonTensorData:
    """One entry for each row."""
    if len(values) == 0:
        return NonTensorData(NoRows(), batch_size=[0])
    return NonTensorStack(*(NonTensorData(value) for value in values))
