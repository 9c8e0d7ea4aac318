"""Next-token prediction on micro-batches of token ids and labels, as `roll.data` loads them.

A micro-batch is what `load_accum_batch` gives: packed (`input_ids` `[1, P]` with `cu_seqlens` and `indexes`) or
unpacked (`input_ids` `[micro_bsz, seq_len]` alone), already cut to this rank's part of the sequence in mode isp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from roll.data.loading import Data
from roll.data.packs import IGNORED
from roll.models.packed_sequence import PackedSequence
from roll.parallel.state import ParallelState

TokenMicroBatch = tuple[Data, Tensor]
"""Data and labels; a label of -100 is not learned."""


def count_labels(micro_batches: Sequence[TokenMicroBatch], state: ParallelState, device: torch.device) -> int:
    """Labels that are learned, of the whole step: all micro-batches of all ranks that have different tokens.

    Collective over these ranks.
    """
    count = torch.zeros((), dtype=torch.int64, device=device)
    for _, labels in micro_batches:
        count += (labels != IGNORED).sum()
    dist.all_reduce(count, group=state.megatron.dp_cp)
    return int(count)


def token_forward_step(
    gpt: GPTModel,
    state: ParallelState,
    num_labels: int,
    token_chunk: int,
    data_iterator: Iterator[TokenMicroBatch],
    model: nn.Module,
) -> tuple[Tensor, partial[Any]]:
    """One micro-batch through this stage, for Megatron-Core's schedules; bind the first four arguments.

    The loss is the sum of this rank's cross-entropies divided by `num_labels`, the labels of the whole step.
    """
    data, labels = next(data_iterator)
    output = model(
        input_ids=data["input_ids"],
        position_ids=None,  # They are part of the packed sequence.
        attention_mask=None,
        packed_seq_params=_packed_sequence(data, state),
    )
    return output, partial(_token_loss, gpt, labels, num_labels, token_chunk)


def _packed_sequence(data: Data, state: ParallelState) -> PackedSequence:
    shard, shards = state.cp.rank(), state.cp.size()
    if "cu_seqlens" in data:
        return PackedSequence.of_shard(data["cu_seqlens"], data["indexes"], shard, shards)
    rows, own_length = data["input_ids"].shape
    return PackedSequence.unpacked(rows, own_length * shards, shard, shards, device=data["input_ids"].device)


def _token_loss(
    gpt: GPTModel, labels: Tensor, num_labels: int, token_chunk: int, output: Tensor, non_loss_data: bool = False
) -> Any:
    learned = labels != IGNORED
    targets = torch.where(learned, labels, 0)
    log_probs = gpt.head.own_log_probs(output, targets, temperature=1.0, chunk=token_chunk)
    loss = -torch.where(learned, log_probs, 0.0).sum() / num_labels
    metrics = {"loss": loss.detach().clone()}
    if non_loss_data:
        return metrics
    # No tokens are reported to the schedule, so it divides by nothing: the loss is already normalised.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics
