"""A model that is split over ranks, read from and written in the Hugging Face layout.

Nothing here holds the whole model: a rank reads only its own slices, and writes one file's worth of tensors at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError

from roll.checkpoint.companions import refuse_to_delete, write_companions
from roll.checkpoint.folders import Kind, begin_folder, finish_folder, on_rank_0
from roll.checkpoint.hf_writer import MAX_SHARD_BYTES, ShardWriter, write_index
from roll.checkpoint.tensor_sources import TensorSource
from roll.config import ModelConfig, expand_path
from roll.models.family_tensors import to_family
from roll.models.hf_mapping import export_hf_tensors, mapped_parameters
from roll.parallel.state import ParallelState

T = TypeVar("T")


def load_weights(model: GPTModel, source: TensorSource, state: ParallelState) -> None:
    """Fill this rank's part of the model from `source`."""
    with torch.no_grad():
        for mapped in mapped_parameters(model, state.mode):
            for name, part in zip(mapped.hf_names, mapped.parts(), strict=True):
                part.copy_(source.part(name, mapped.dim, *mapped.place(state)))


def save_hf(
    folder: str | Path,
    model: GPTModel,
    config: ModelConfig,
    state: ParallelState,
    *,
    dtype: torch.dtype,
    source: str | Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model as a Hugging Face folder. Collective over all ranks; the folder appears when it is complete.

    The leading rank of each pipeline stage writes its own layers, in `dtype`. The other files come from `source`, the
    folder that the model came from, as `roll.checkpoint.companions` says; None: it came from none.

    Raises:
        ValueError: `source` lies inside of `folder`, or `folder` holds other things than a model; it is replaced.
        OSError: a file cannot be written, or `source` is not there; on every rank alike.
    """
    folder = expand_path(folder)
    source = None if source is None else expand_path(source)
    refuse_to_delete(source, folder)
    folder = folder.resolve()  # A link to a folder stays one: the folder behind it is replaced.
    unfinished = on_rank_0(lambda: begin_folder(folder, Kind.MODEL))
    writer = ShardWriter(unfinished, f"model-stage{state.at.pp:02d}", max_shard_bytes)
    writes = state.at.tp == state.at.cp == state.at.dp == 0
    failure: OSError | None = None
    for name, tensor in to_family(config, export_hf_tensors(model, state, dtype=dtype)):
        if writes and failure is None:  # A rank that cannot write still gathers with the others.
            failure = _error_of(partial(writer.add, name, tensor))
    failure = failure or _error_of(writer.flush)
    written = _from_every_rank(writer.file_of, failure)

    def finish() -> None:
        write_index(unfinished, written)
        write_companions(unfinished, folder, config, dtype, source)
        finish_folder(unfinished, folder)

    on_rank_0(finish)


def _error_of(act: Callable[[], None]) -> OSError | None:
    try:
        act()
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error.
        return OSError(str(error))
    return None


def _from_every_rank(file_of: dict[str, str], failure: OSError | None) -> list[dict[str, str]]:
    """Gathers the files that each rank has written. Raises the first failure on every rank."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, failure or file_of)
    for outcome in outcomes:
        if isinstance(outcome, OSError):
            raise outcome
    return outcomes
