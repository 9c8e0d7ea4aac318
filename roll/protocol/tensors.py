"""The tensors of a batch: a TensorDict [B], and what may be in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from roll.errors import UserError
from roll.protocol.display import describe_value


def own_tensors(batch: Mapping[str, Tensor], objects: Mapping[str, np.ndarray]) -> TensorDict:
    """A TensorDict of these tensors, so that a field added to it does not appear in the caller's dict.

    Raises ValueError if `batch` is no dict of tensors, or tensors and `objects` have different numbers of rows.
    """
    if isinstance(batch, TensorDict):
        return batch.clone(recurse=False)
    if not isinstance(batch, Mapping):
        raise UserError(f"batch must be a dict of tensors, got {type(batch).__name__}")
    for name, value in batch.items():
        check_tensor(name, value)
    lengths = {name: len(tensor) for name, tensor in batch.items()} | {name: len(o) for name, o in objects.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"fields must have the same number of rows, got {lengths}")
    return tensor_dict(batch, next(iter(lengths.values()), 0))


def tensor_dict(tensors: Mapping[str, Tensor], num_rows: int, device: torch.device | None = None) -> TensorDict:
    """These tensors, also where there is none to tell the number of rows.

    On `device`, unless a tensor lies elsewhere: a TensorDict with a device would move it there.
    """
    if device is not None and not all(_is_on(device, tensor) for tensor in tensors.values()):
        device = None
    return TensorDict(dict(tensors), batch_size=[num_rows], device=device)


def _is_on(device: torch.device, tensor: Tensor) -> bool:
    """Whether the tensor lies there; a device without an index is any of its type."""
    theirs = tensor.device
    return device.type == theirs.type and (None in (device.index, theirs.index) or device.index == theirs.index)


def check_tensor(name: str, value: Any) -> None:
    """Refuse what is not a dense tensor [B, ...] with values."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.ndim == 0:
        raise UserError(f"{name} must be a tensor [B, ...], got {describe_value(value)}")
    if value.is_meta:
        raise UserError(f"{name} has no values: it is on the device meta")
