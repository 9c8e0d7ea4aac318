"""The meeting of ranks: one store for each launch, and keys of its own for each process group made over it.

torch's own rendezvous opens its store anew each time. A second process group of one process then finds the port taken,
or the addresses of the first group, and waits for ranks that are not there. All ranks join equally often: to join is a
collective call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from roll.errors import UserError


@dataclass
class _Rendezvous:
    """A store that the ranks of this launch share, and how many process groups were made over it."""

    address: tuple[str | None, ...]
    """The environment that it was made from."""
    store: dist.Store
    rank: int
    world_size: int
    joined: int = 0


_rendezvous: _Rendezvous | None = None
"""The rendezvous of the process groups that were made in this process."""


def join(backend: str, timeout: timedelta | None = None) -> None:
    """Join torch.distributed as `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` say; again over the same store.

    Args:
        timeout: of collectives, and of waiting for the other ranks; torch's own by default.

    Raises:
        ValueError: the ranks cannot meet at their address.
    """
    global _rendezvous
    patience = timeout or default_pg_timeout
    address = tuple(map(os.environ.get, ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")))
    try:
        if _rendezvous is None or _rendezvous.address != address:
            _rendezvous = _Rendezvous(address, *next(dist.rendezvous("env://", timeout=patience)))
        _rendezvous.store.set_timeout(patience)
        store = dist.PrefixStore(f"roll/{_rendezvous.joined}", _rendezvous.store)
        _rendezvous.joined += 1
        dist.init_process_group(
            backend,
            store=store,
            rank=_rendezvous.rank,
            world_size=_rendezvous.world_size,
            timeout=timeout,
        )
    except dist.DistNetworkError as error:  # The port is taken, or nobody listens there.
        place = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
        raise UserError(f"{place}: the ranks cannot meet there: {str(error).splitlines()[0]}") from error
    await_all()


def await_all() -> None:
    """Return when every rank has made the groups that this one has made.

    Gloo connects the ranks of a group when it is made, and torch does not wait for slower ranks. Without this, a rank
    that leaves its groups at once breaks the connections that the others are still making. NCCL connects later.
    """
    if dist.get_backend() == "gloo":
        dist.barrier()
