"""From tasks and token rows to micro-batches: tokenizers, prompts, packing, the plan of a step.

The public names are loaded when they are first used: neither transformers nor datasets comes with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.data.pack import build_pack
    from roll.data.packed_dataset import PackedDataset
    from roll.data.packs import Pack
    from roll.data.sources.lists import ListSource
    from roll.data.sources.sample import Sample, SampleSource
    from roll.data.sources.tokenized_folder import TokenizedFolder
    from roll.data.unpack import build_unpack

__all__ = [
    "ListSource",
    "Pack",
    "PackedDataset",
    "Sample",
    "SampleSource",
    "TokenizedFolder",
    "build_pack",
    "build_unpack",
]

_MODULES = {
    "ListSource": "sources.lists",
    "Pack": "packs",
    "PackedDataset": "packed_dataset",
    "Sample": "sources.sample",
    "SampleSource": "sources.sample",
    "TokenizedFolder": "sources.tokenized_folder",
    "build_pack": "pack",
    "build_unpack": "unpack",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
