"""A model that is split over ranks, read from and written in the Hugging Face layout.

Nothing here holds the whole model: a rank reads only its own slices, and writes one file's worth of tensors at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from roll.checkpoint.companions import refuse_to_delete, write_companions
from roll.checkpoint.folders import Kind, new_folder, on_every_rank, on_rank_0
from roll.checkpoint.hf_writer import MAX_SHARD_BYTES, ShardWriter, write_index
from roll.checkpoint.tensor_sources import TensorSource
from roll.config import ModelConfig, expand_path
from roll.models.family_tensors import to_family
from roll.models.hf_mapping import export_hf_tensors, mapped_parameters
from roll.parallel.state import ParallelState


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
    known: Iterable[Path] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model as a Hugging Face folder. Collective over all ranks; the folder appears when it is complete.

    The leading rank of each pipeline stage writes its own layers, in `dtype`. The other files come from `source`, the
    folder that the model came from, as `roll.checkpoint.companions` says; None: it came from none. `known` are those of
    them that `source` had when the model was loaded: a warning names what it has lost since.

    Raises:
        ValueError: `source` lies inside of `folder`, or `folder` holds other things than a model; it is replaced.
        OSError: a file cannot be written; on every rank alike, with `folder` and the system's reason.
    """
    folder = expand_path(folder)
    source = None if source is None else expand_path(source)
    refuse_to_delete(source, folder)
    folder = folder.resolve()  # A link to a folder stays one: the folder behind it is replaced.
    with new_folder(folder, Kind.MODEL) as unfinished:
        writer = ShardWriter(unfinished, f"model-stage{state.at.pp:02d}", max_shard_bytes)
        writes = state.at.tp == state.at.cp == state.at.dp == 0
        failure: OSError | None = None
        for name, tensor in to_family(config, export_hf_tensors(model, state, dtype=dtype)):
            if writes and failure is None:
                try:
                    writer.add(name, tensor)
                except OSError as error:  # A rank that cannot write still gathers with the others.
                    failure = error

        def end() -> None:
            if failure is not None:
                raise failure
            writer.flush()

        on_every_rank(end)
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, writer.file_of)

        def finish() -> None:
            write_index(unfinished, written)
            write_companions(unfinished, folder, config, dtype, source, known)

        on_rank_0(finish)
