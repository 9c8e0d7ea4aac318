"""The environment of a launcher, for ranks of the pool that join torch.distributed by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def launched(*, agent: bool = True) -> Iterator[None]:
    """Leave the pool's process group, for an environment as torchrun sets it.

    Args:
        agent: whether the store is the launcher's, as torchrun's is, or rank 0's own.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [None if store is None else store.port]
    dist.broadcast_object_list(port)
    if not agent:
        store = None  # Rank 0 will bind the port itself.
    dist.barrier()
    dist.destroy_process_group()
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port[0],
        "TORCHELASTIC_USE_AGENT_STORE": agent,
    }
    with patch.dict(os.environ, {name: str(value) for name, value in environment.items()}):
        yield
    del store
