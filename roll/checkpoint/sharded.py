"""Complete training state, saved and loaded in parallel by every rank, under any degrees.

Megatron-Core's dist_checkpointing does the work: each tensor is stored with its place in the whole, so a checkpoint
made at tp 2 is read at pp 2.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from roll.checkpoint.folders import Kind, begin_folder, finish_folder, on_rank_0
from roll.checkpoint.refusals import check_same_model, damage_named
from roll.config import expand_path
from roll.errors import UserError


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
        ValueError: the folder is not a complete checkpoint, or its file is damaged; on every rank alike.
    """
    folder = expand_path(folder)

    def read() -> dict[str, Any]:
        _check_complete(folder)
        with damage_named(folder / "common.pt"):
            return dist_checkpointing.load_common_state_dict(str(folder))

    return on_rank_0(read)


def load_sharded(folder: str | Path, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Fill a sharded state dict of this rank's layout from a checkpoint and return the plain state dict. Collective.

    Tensors are loaded in place: into live weights, where `state_dict` holds views of them. Whatever else could be a
    reason to refuse the checkpoint is asked of `load_common` before. After a file of tensors that proves damaged while
    it is read, the content of `state_dict` is undefined.

    Raises:
        ValueError: the folder is not a complete checkpoint, is one of another model, or a file is damaged; on every
            rank alike.
    """
    folder = expand_path(folder)
    ours: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ours, {place.key: tuple(place.global_shape) for place in _sharded_tensors(state_dict)})

    def check() -> None:
        _check_complete(folder)
        with damage_named(folder / ".metadata"):
            metadata = dist_checkpointing.load_tensors_metadata(str(folder))
        theirs = {name: tuple(tensor.global_shape) for name, tensor in metadata.items()}
        check_same_model(theirs, {name: shape for of_rank in ours for name, shape in of_rank.items()})

    on_rank_0(check)
    try:
        return dist_checkpointing.load(state_dict, str(folder))
    except CheckpointException as error:  # A BaseException, on all ranks if reading fails on one.
        reason = next(iter(error.failures.values()))[0]
        raise UserError(f"{folder} is damaged: its tensors cannot be read ({reason})") from error


def _sharded_tensors(value: Any) -> Iterator[ShardedTensor]:
    """All sharded tensors of a state dict, in nested dicts too."""
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _sharded_tensors(entry)


def _check_complete(folder: Path) -> None:
    """Raise ValueError unless the files are there without which Megatron-Core ends in errors of its own."""
    incomplete = f"{folder} is not a complete checkpoint (an interrupted save leaves `*.unfinished`)"
    absent = [name for name in ("metadata.json", ".metadata", "common.pt") if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{incomplete}: it holds no {', '.join(absent)}")
    try:
        dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except (TypeError, ValueError) as error:  # Not JSON, or JSON of something else.
        raise UserError(f"{folder / 'metadata.json'} is damaged, or not of a checkpoint: {error}") from error
