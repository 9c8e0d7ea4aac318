"""A step's batch from the loader, and its micro-batches one at a time, as InternEvo names and shapes them.

    batch_data, actual_batch_size = load_batch(data_iter)
    for data, labels in load_accum_batches(batch_data, process):
        ...

M = micro_num packs of P = micro_bsz * seq_len tokens. A batch is `[data, labels]` with `data["input_ids"]` `[M, P]`
int64, `data["cu_seqlens"]` a list of M tensors `[segments + 1]` int32, `data["indexes"]` `[M, P]` int64 and labels
`[M, P]` int64. No function here changes what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Data = dict[str, Any]
"""Inputs of a model beside labels: tensors, lists of tensors and plain numbers under their names."""

ProcessFunc = Callable[[Data, Tensor], tuple[Data, Tensor]]
"""A step of processing: a micro-batch's data and labels as the next step wants them."""


def load_batch(
    data_iter: Iterator[tuple[Data, Tensor]], device: torch.device | str | None = None
) -> tuple[list[Any], int]:
    """The next batch `[data, labels]` on `device`, and its number of packs M.

    `cu_seqlens` stays on the CPU, where its differences are read without waiting for the device. M counts packs of
    padding too (`PackBatchSampler`), so it is the same on every rank. Raises StopIteration after the last batch.
    """
    data, labels = next(data_iter)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.items()}
    return [moved, labels.to(device)], len(labels)


def load_micro_batch(data: Data, labels: Tensor, offset: int) -> tuple[Data, Tensor]:
    """Pack `offset` of a batch, every tensor and list with a first dimension of 1. Raises IndexError beyond M."""
    if not 0 <= offset < len(labels):
        raise IndexError(f"micro-batch {offset} of {len(labels)}")
    here = slice(offset, offset + 1)
    return {name: value[here] for name, value in data.items()}, labels[here]


def load_accum_batch(
    data: Data, labels: Tensor, offset: int, process: Sequence[ProcessFunc] = ()
) -> tuple[Data, Tensor]:
    """Micro-batch `offset`, processed as `data_process` says, ready for the model."""
    return processed(*load_micro_batch(data, labels, offset), process)


def processed(data: Data, labels: Tensor, process: Sequence[ProcessFunc]) -> tuple[Data, Tensor]:
    """A micro-batch after the steps of `process`, one after the other."""
    for function in process:
        data, labels = function(data, labels)
    return data, labels


def load_accum_batches(batch_data: Sequence[Any], process: Sequence[ProcessFunc] = ()) -> Iterator[tuple[Data, Tensor]]:
    """All micro-batches of a batch in order, processed."""
    data, labels = batch_data
    for offset in range(len(labels)):
        yield load_accum_batch(data, labels, offset, process)
