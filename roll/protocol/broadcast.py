"""Broadcasts from the first rank of a group to all others: of small Python objects, and of bytes.

A whole batch, which must also tell of a leader's refusal and of ranks that do not come, is the business of
`BatchDelivery`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from roll.errors import UserError


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
        raise UserError(f"broadcast_obj: the first rank's object cannot be pickled: {objects[0]}") from failed
    return obj if dist.get_rank(group) == 0 else pickle.loads(objects[1])


PIECE_BYTES = 1 << 24
"""Size of a piece of a broadcast of bytes: a rank passes on one piece while it receives the next."""


def broadcast_bytes(runs: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `runs`, uint8 of the same sizes on all ranks, with what the group's first rank has in them."""
    source = dist.get_process_group_ranks(group)[0]
    pieces = [piece for run in runs if run.numel() for piece in run.split(PIECE_BYTES)]
    for sent in [dist.broadcast(piece, src=source, group=group, async_op=True) for piece in pieces]:
        sent.wait()
