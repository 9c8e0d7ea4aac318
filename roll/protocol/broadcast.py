"""How a batch reaches the ranks of a group: from the group's first rank to all others.

Python objects travel as a pickle (`broadcast_obj`). Tensors do not: a small header names them, their dtypes and shapes,
and the values follow as one flat buffer of bytes for each dtype, so nothing is encoded, and every dtype is exact, also
under a backend that does not know it.

A batch that its leader must refuse is an error on one rank, while the others wait for the batch. So the error travels
in the batch's place, and every rank raises it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from roll.platform import get_platform
from roll.protocol.data_proto import DataProto


@dataclass(frozen=True)
class _Spec:
    """One tensor, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Header:
    """What is said before the values: either an error, or what follows."""

    error: str | None = None
    specs: tuple[_Spec, ...] = ()
    num_rows: int = 0
    non_tensors: bytes | None = None


def broadcast_obj(obj: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's object, on every rank of the group; it travels as a pickle.

    The first rank is the group's own first, whatever its global number.
    """
    objects = [obj if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(objects, src=dist.get_process_group_ranks(group)[0], group=group)
    return objects[0]


def broadcast_tensors(
    tensors: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """The first rank's tensors, on every rank of the group, on `device`.

    Args:
        tensors: read on the group's first rank; of any dtype, shape and memory layout.
        group: the ranks.
        device: where the values travel and arrive; by default the one that the group's backend needs.

    Returns:
        The same names in the same order, detached. Received tensors of one dtype share a storage.

    Raises:
        ValueError: on every rank, if the first rank has no tensors to give.
    """
    header = None
    if dist.get_rank(group) == 0:
        header = _Header(error="the first rank has no tensors") if tensors is None else _Header(specs=_specs(tensors))
    header = broadcast_obj(header, group)
    if header.error is not None:
        raise ValueError(f"broadcast_tensors: {header.error}")
    return _broadcast_values(header.specs, tensors or {}, group, device or _device_of(group))


def broadcast_batch(
    batch: DataProto,
    group: dist.ProcessGroup | None,
    *,
    non_tensor: bool,
    error: Exception | None = None,
    device: torch.device | None = None,
) -> DataProto:
    """The rows of the first rank's batch, on every rank of the group.

    The other ranks bring a stub of the same batch: its meta_info, plan and normalizers stay, its rows are replaced.

    Args:
        batch: the rows on the group's first rank, a stub elsewhere.
        group: the ranks; the first of the group leads, whatever its global number. None is the default group.
        non_tensor: read on the first rank: whether `non_tensor_batch` goes along.
        error: read on the first rank: why its batch is refused.
        device: as in `broadcast_tensors`.

    Raises:
        ValueError: on every rank, with the first rank's message, if it has an error, no rows, or objects that cannot be
            pickled. A rank that leads a further group passes what it caught on as that group's `error`; the ranks
            there are waiting too.
    """
    device = device or _device_of(group)
    leads = dist.get_rank(group) == 0
    header: _Header = broadcast_obj(_header(batch, non_tensor, error) if leads else None, group)
    if header.error is not None:
        if leads and isinstance(error, ValueError):
            raise error
        raise ValueError(header.error) from (error if leads else None)
    received = _broadcast_values(header.specs, batch.tensors if leads else {}, group, device)
    result = replace(batch, batch=TensorDict(received, batch_size=[header.num_rows]), non_tensor_batch={})
    if leads:
        return replace(result, non_tensor_batch=batch.non_tensor_batch)
    objects: dict[str, np.ndarray] = {} if header.non_tensors is None else pickle.loads(header.non_tensors)
    return replace(result, non_tensor_batch=objects)


def _header(batch: DataProto, non_tensor: bool, error: Exception | None) -> _Header:
    if error is not None:
        return _Header(error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    if batch.batch is None:
        return _Header(error="the first rank of the group has no rows, only a stub")
    try:
        objects = pickle.dumps(dict(batch.non_tensor_batch)) if non_tensor else None
    except (pickle.PicklingError, TypeError, AttributeError) as refused:  # all three are what pickle raises
        return _Header(error=f"non_tensor_batch cannot be pickled: {refused}")
    return _Header(specs=_specs(batch.tensors), num_rows=len(batch), non_tensors=objects)


def _specs(tensors: Mapping[str, Tensor]) -> tuple[_Spec, ...]:
    return tuple(_Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must lie for this group's collectives."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else get_platform().device()


def _broadcast_values(
    specs: tuple[_Spec, ...], tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Tensor]:
    """The values that belong to `specs`; `tensors` is read on the group's first rank."""
    source = dist.get_process_group_ranks(group)[0]
    leads = dist.get_rank(group) == 0
    values = {name: tensor.detach().to(device) for name, tensor in tensors.items()}
    for dtype in dict.fromkeys(spec.dtype for spec in specs):
        chosen = [spec for spec in specs if spec.dtype == dtype]
        sizes = [torch.Size(spec.shape).numel() for spec in chosen]
        if leads:
            flat = torch.cat([values[spec.name].reshape(-1) for spec in chosen])
        else:
            flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if flat.numel():
            dist.broadcast(flat.view(torch.uint8), src=source, group=group)
        if not leads:
            parts = zip(chosen, flat.split(sizes), strict=True)
            values |= {spec.name: part.view(spec.shape) for spec, part in parts}
    return {spec.name: values[spec.name] for spec in specs}
