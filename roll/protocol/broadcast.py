"""Broadcasts from the first rank of a group to all others: of small Python objects, and of tensors.

Objects travel as a pickle, tensors as a header and flat bytes (`roll.protocol.wire`). A whole batch, which must also
tell of a leader's refusal and of ranks that do not come, is the business of `BatchDelivery`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.platform import get_platform
from roll.protocol.wire import flatten, specs_of, total_bytes, unflatten


def broadcast_obj(obj: Any, group: dist.ProcessGroup | None) -> Any:
    """The first rank's object, on every rank of the group; it travels as a pickle.

    The first rank is the group's own first, whatever its global number.

    Raises ValueError, on every rank, if the object cannot be pickled.
    """
    objects: list[Any] = [None, None]  # what the first rank could not do, the pickle
    failed: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            objects[1] = pickle.dumps(obj)
        except Exception as error:  # noqa: BLE001 - whatever it is: the others wait, and must hear of it
            failed, objects[0] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(objects, src=dist.get_process_group_ranks(group)[0], group=group)
    if objects[0] is not None:
        raise ValueError(f"broadcast_obj: the first rank's object cannot be pickled: {objects[0]}") from failed
    return obj if dist.get_rank(group) == 0 else pickle.loads(objects[1])


def broadcast_tensors(
    tensors: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> dict[str, Tensor]:
    """The first rank's tensors, on every rank of the group, on `device`.

    Args:
        tensors: read on the group's first rank; of any dtype, shape and memory layout.
        group: the ranks.
        device: where the values travel and arrive; by default the one that the group's backend needs.

    Returns:
        The same names in the same order, detached. Received tensors share a storage.

    Raises:
        ValueError: on every rank, if the first rank has no tensors to give.
    """
    device = device or device_of(group)
    leads = dist.get_rank(group) == 0
    specs = broadcast_obj(None if tensors is None else specs_of(tensors), group)
    if specs is None:
        raise ValueError("broadcast_tensors: the first rank has no tensors")
    flat = torch.empty(total_bytes(specs), dtype=torch.uint8, device=device)
    if leads:
        assert tensors is not None
        flatten(tensors, specs, flat)
    broadcast_bytes(flat, group)
    if leads:
        return {name: tensor.detach().to(device) for name, tensor in (tensors or {}).items()}
    return unflatten(flat, specs)


def broadcast_bytes(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `flat`, uint8 of one size on all ranks, with what the group's first rank has in it."""
    if flat.numel():
        dist.broadcast(flat, src=dist.get_process_group_ranks(group)[0], group=group)


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must lie for this group's collectives."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else get_platform().device()
