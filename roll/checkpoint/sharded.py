"""Complete training state, saved and loaded in parallel by every rank, under any degrees.

Megatron-Core's dist_checkpointing does the work: each tensor is stored with its place in the whole, so a checkpoint
made at tp 2 is read at pp 2. Its own `save` leaves all other ranks waiting where one cannot write; here every step of a
save ends with the ranks telling each other whether they could.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from roll.checkpoint.checksums import Checksum, check_files, checksums_of, read_checksums, write_checksums
from roll.checkpoint.folders import Kind, new_folder, on_every_rank, on_rank_0
from roll.checkpoint.refusals import check_same_model
from roll.config import expand_path
from roll.errors import UserError

SMALL_FILES = (COMMON_STATE_FNAME, "metadata.json", ".metadata")
"""Files of a checkpoint that rank 0 writes. All others hold tensors."""


def save_sharded(folder: str | Path, state_dict: dict[str, Any]) -> None:
    """Write a sharded state dict. Collective; the folder appears when every rank has written its part.

    Raises:
        OSError: a rank cannot write its part; on every rank alike, with the folder and the system's reason. An older
            checkpoint is still in its place.
        ValueError: the folder holds other things than a checkpoint; it is replaced.
    """
    with new_folder(expand_path(folder), Kind.CHECKPOINT) as unfinished:
        tensors, common = save_preprocess(state_dict)
        strategy = _Saving("torch_dist", 1)
        request = strategy.async_save(tensors, unfinished)
        results, sums = on_every_rank(lambda: strategy.write(request, unfinished))
        gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((results, sums), gathered, dst=0)

        def write_rest() -> None:
            assert gathered is not None
            strategy.writer.finish(strategy.metadata, [of_rank for of_rank, _ in gathered])
            with (unfinished / COMMON_STATE_FNAME).open("wb") as file:  # By its name, torch hides the system's reason.
                torch.save(common, file)
                os.fsync(file.fileno())
            save_config(CheckpointingConfig(strategy.backend, strategy.version), str(unfinished))
            sums = {name: of_file for _, of_rank in gathered for name, of_file in of_rank.items()}
            write_checksums(unfinished, sums | checksums_of(unfinished, SMALL_FILES))

        on_rank_0(write_rest)


class _Saving(TorchDistSaveShardedStrategy):
    """One save in the parts of which Megatron-Core makes it, so that each part can fail on every rank."""

    writer: filesystem_async.FileSystemWriterAsync
    metadata: Metadata

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        # Results of the writers come back through this queue. Megatron-Core would start a server process for it, so
        # that a save can go on in the background; that process outlives a rank that is killed. Ours ends before we go
        # on.
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

    def write(self, request: AsyncRequest, folder: Path) -> tuple[list[WriteResult], dict[str, Checksum]]:
        """Write this rank's files. Returns the places of tensors in them, and their checksums.

        Raises:
            OSError: a file cannot be written.
        """
        if request.async_fn is not None:
            rank, _, results_queue = request.async_fn_args
            request.async_fn(rank, request.preload_fn(), results_queue)
        results = self.writer.retrieve_write_results()
        if isinstance(results, tuple):  # An exception and its stack. Of a writer's failure, that is the cause.
            raise results[0].__cause__ or results[0]
        files = [file for _, file, _ in self.writer.write_buckets]
        return results, checksums_of(folder, files)


def load_common(folder: str | Path) -> dict[str, Any]:
    """Everything of a checkpoint but its tensors. Collective: rank 0 reads, all ranks get the same.

    Raises:
        ValueError: the folder is not a complete checkpoint, or its file is damaged; on every rank alike.
    """
    folder = expand_path(folder)

    def read() -> dict[str, Any]:
        _check_small_files(folder)
        return dist_checkpointing.load_common_state_dict(str(folder))

    return on_rank_0(read)


def load_sharded(folder: str | Path, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Fill a sharded state dict of this rank's layout from a checkpoint and return the plain state dict. Collective.

    Tensors are loaded in place: into live weights, where `state_dict` holds views of them. A refused checkpoint changes
    nothing: before the first tensor is read, every rank compares a share of the files with their checksums.

    Raises:
        ValueError: the folder is not a complete checkpoint, is one of another model, or a file is damaged; on every
            rank alike.
        OSError: a file that was right a moment ago cannot be read; on every rank alike. The tensors of `state_dict` are
            then replaced in part.
    """
    folder = expand_path(folder)
    ours: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ours, {place.key: tuple(place.global_shape) for place in _sharded_tensors(state_dict)})

    def check() -> dict[str, Checksum]:
        sums = _check_small_files(folder)
        metadata = dist_checkpointing.load_tensors_metadata(str(folder))
        theirs = {name: tuple(tensor.global_shape) for name, tensor in metadata.items()}
        check_same_model(theirs, {name: shape for of_rank in ours for name, shape in of_rank.items()})
        return {name: sums[name] for name in sums if name not in SMALL_FILES}

    sums = on_rank_0(check)
    own = _share(sums, dist.get_rank(), dist.get_world_size())
    on_every_rank(lambda: check_files(folder, own))
    try:
        return dist_checkpointing.load(state_dict, str(folder))
    except CheckpointException as error:  # A BaseException, on all ranks if reading fails on one.
        reason = next(iter(error.failures.values()))[0]
        told = f"tensors cannot be read, and weights are replaced in part: {reason}"
        raise OSError(getattr(reason, "errno", None), told, str(folder)) from error


def _share(sums: dict[str, Checksum], rank: int, world_size: int) -> dict[str, Checksum]:
    """Files that this rank checks: every file is one rank's, the largest are dealt first."""
    by_size = sorted(sums, key=lambda name: (-sums[name].num_bytes, name))
    return {name: sums[name] for name in by_size[rank::world_size]}


def _sharded_tensors(value: Any) -> Iterator[ShardedTensor]:
    """All sharded tensors of a state dict, in nested dicts too."""
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _sharded_tensors(entry)


def _check_small_files(folder: Path) -> dict[str, Checksum]:
    """Checksums of all files. Raises ValueError if a file is not there, has another size, or is a damaged small one."""
    sums = read_checksums(folder)
    unlisted = [name for name in SMALL_FILES if name not in sums]
    if unlisted:
        raise UserError(f"{folder} is not a checkpoint of Megatron-Core: it holds no {', '.join(unlisted)}")
    check_files(folder, {name: sums[name] for name in SMALL_FILES})
    return sums
