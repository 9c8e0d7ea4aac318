"""Complete training state, saved and loaded in parallel by every rank, under any degrees.

Megatron-Core's dist_checkpointing does the work: each tensor is stored with its place in the whole, so a checkpoint
made at tp 2 is read at pp 2.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from roll.checkpoint.folders import Kind, begin_folder, finish_folder, on_rank_0
from roll.config import expand_path


def save_sharded(folder: str | Path, state_dict: dict[str, Any]) -> None:
    """Write a sharded state dict. Collective; the folder appears when every rank has written its part.

    Raises:
        OSError: rank 0 cannot make the folder; on every rank alike.
        ValueError: the folder holds other things than a checkpoint; it is replaced.
    """
    folder = expand_path(folder)
    unfinished = on_rank_0(lambda: begin_folder(folder, Kind.CHECKPOINT))
    # Results of the writers come back through this queue. Megatron-Core would start a server process for it, so that
    # a save can go on in the background; that process outlives a rank that is killed. Ours ends before we go on.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(state_dict, str(unfinished))
    dist.barrier()
    on_rank_0(lambda: finish_folder(unfinished, folder))


def load_common(folder: str | Path) -> dict[str, Any]:
    """Everything of a checkpoint but its tensors. Collective: rank 0 reads, all ranks get the same.

    Raises:
        ValueError: the folder is not a complete checkpoint; on every rank alike.
    """
    folder = expand_path(folder)

    def read() -> dict[str, Any]:
        _check_complete(folder)
        return dist_checkpointing.load_common_state_dict(str(folder))

    return on_rank_0(read)


def load_sharded(folder: str | Path, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Fill a sharded state dict of this rank's layout from a checkpoint and return the plain state dict. Collective.

    Tensors are loaded in place: into live weights, where `state_dict` holds views of them. Whatever else could be a
    reason to refuse the checkpoint is asked of `load_common` before.

    Raises:
        ValueError: the folder is not a complete checkpoint; on every rank alike.
    """
    folder = expand_path(folder)
    on_rank_0(lambda: _check_complete(folder))
    return dist_checkpointing.load(state_dict, str(folder))


def _check_complete(folder: Path) -> None:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise ValueError(f"{folder} is not a complete checkpoint (an interrupted save leaves `*.unfinished`)")
