"""A model that is split over ranks, read from and written in the Hugging Face layout.

Nothing here holds the whole model: a rank reads only its own slices, and writes one file's worth of tensors at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from roll.checkpoint.folders import begin_folder, finish_folder
from roll.checkpoint.hf_writer import MAX_SHARD_BYTES, ShardWriter, copy_tokenizer, write_config, write_index
from roll.checkpoint.tensor_sources import TensorSource
from roll.config import ModelConfig
from roll.models.families import to_family
from roll.models.hf_mapping import export_hf_tensors, mapped_parameters
from roll.parallel.state import ParallelState

T = TypeVar("T")


def load_weights(model: GPTModel, source: TensorSource, state: ParallelState) -> None:
    """Fill this rank's part of the model from `source`."""
    with torch.no_grad():
        for mapped in mapped_parameters(model, state.mode):
            for name, part in zip(mapped.hf_names, mapped.parts(), strict=True):
                part.copy_(source.part(name, mapped.dim, state.weights.rank(), state.weights.size()))


def save_hf(
    folder: Path,
    model: GPTModel,
    config: ModelConfig,
    state: ParallelState,
    *,
    tokenizer_from: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model as a Hugging Face folder. Collective over all ranks; the folder appears when it is complete.

    The leading rank of each pipeline stage writes its own layers. Tokenizer files of `tokenizer_from` are copied along.

    Raises:
        OSError: rank 0 cannot make the folder, or `tokenizer_from` is not there; on every rank alike.
    """
    unfinished = _on_rank_0(state, lambda: begin_folder(folder))
    writer = ShardWriter(unfinished, f"model-stage{state.at.pp:02d}", max_shard_bytes)
    writes = state.at.tp == state.at.cp == state.at.dp == 0
    for name, tensor in to_family(config, export_hf_tensors(model, state)):
        if writes:
            writer.add(name, tensor)
    writer.flush()
    written: list[dict[str, str]] = [{} for _ in range(state.degrees.world_size)]
    dist.all_gather_object(written, writer.file_of)

    def finish() -> None:
        write_index(unfinished, written)
        write_config(unfinished, config, next(model.parameters()).dtype)
        copy_tokenizer(tokenizer_from, unfinished)
        finish_folder(unfinished, folder)

    _on_rank_0(state, finish)


def _on_rank_0(state: ParallelState, act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, or its OSError, on every rank. Collective: nobody goes on before rank 0 is done.

    Were the error left to rank 0 alone, the others would wait for it until their group's timeout.
    """
    outcome: list[Any] = [None, None]
    if state.rank == 0:
        try:
            outcome[0] = act()
        except OSError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome
    if failure is not None:
        raise failure
    return value
