"""From tasks and token rows to micro-batches: tokenizers, prompts, packing, the plan of a step.

The public names are loaded when they are first used: neither transformers nor pyarrow comes with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.data.batch_loader import BatchLoader
    from roll.data.batch_sampler import PackBatchSampler, RampUp
    from roll.data.loading import load_accum_batch, load_accum_batches, load_batch, load_micro_batch
    from roll.data.pack import build_pack
    from roll.data.packed_dataset import PackedDataset
    from roll.data.packed_loader import PackedLoader
    from roll.data.packs import Pack
    from roll.data.processing import (
        data_process,
        packed_data_normalizer,
        split_data_sequence_parallel,
        unpack_data,
    )
    from roll.data.sources.lists import ListSource
    from roll.data.sources.paragraphs import Paragraphs
    from roll.data.sources.sample import DataError, Sample, SampleSource
    from roll.data.sources.text_files import TextFiles
    from roll.data.sources.tokenized_folder import TokenizedFolder
    from roll.data.unpack import build_unpack

__all__ = [
    "BatchLoader",
    "DataError",
    "ListSource",
    "Pack",
    "PackBatchSampler",
    "PackedDataset",
    "PackedLoader",
    "Paragraphs",
    "RampUp",
    "Sample",
    "SampleSource",
    "TextFiles",
    "TokenizedFolder",
    "build_pack",
    "build_unpack",
    "data_process",
    "load_accum_batch",
    "load_accum_batches",
    "load_batch",
    "load_micro_batch",
    "packed_data_normalizer",
    "split_data_sequence_parallel",
    "unpack_data",
]

_MODULES = {
    "BatchLoader": "batch_loader",
    "DataError": "sources.sample",
    "ListSource": "sources.lists",
    "Pack": "packs",
    "PackBatchSampler": "batch_sampler",
    "PackedDataset": "packed_dataset",
    "PackedLoader": "packed_loader",
    "RampUp": "batch_sampler",
    "Paragraphs": "sources.paragraphs",
    "Sample": "sources.sample",
    "SampleSource": "sources.sample",
    "TaskAnswers": "task_answers",
    "TextFiles": "sources.text_files",
    "TokenizedFolder": "sources.tokenized_folder",
    "build_pack": "pack",
    "build_unpack": "unpack",
    "data_process": "processing",
    "load_accum_batch": "loading",
    "load_accum_batches": "loading",
    "load_batch": "loading",
    "load_micro_batch": "loading",
    "packed_data_normalizer": "processing",
    "split_data_sequence_parallel": "processing",
    "unpack_data": "processing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
