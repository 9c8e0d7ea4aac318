"""Next-token prediction on micro-batches of token ids and labels, as `roll.data` loads them.

A micro-batch is what `load_accum_batch` gives: packed (`input_ids` `[1, P]` with `cu_seqlens`) or unpacked (`input_ids`
`[micro_bsz, seq_len]` alone). In mode isp it is this rank's part of the sequence already; in the others it is whole,
the same on all ranks that share it, and cp ranks take their part of it here. Positions follow from `cu_seqlens`, as
`indexes` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from roll.data.loading import Data
from roll.data.packing import align_segments
from roll.data.packs import IGNORED, PAD_ID
from roll.data.sequence_split import SequenceSplit
from roll.errors import UserError
from roll.models.packed_sequence import PackedSequence
from roll.parallel.state import ParallelState
from roll.strategies.micro_batch import MicroBatch
from roll.strategies.output import Loss
from roll.strategies.packed_output import OwnOutput

TokenMicroBatch = tuple[Data, Tensor]
"""Data and labels; a label of -100 is not learned."""


@dataclass(frozen=True)
class LabelledTokens(MicroBatch[Tensor, OwnOutput]):
    """This rank's tokens of a micro-batch; the data of the loss are their labels, `[b, s]` int64.

    Labels are those of the whole: each stands beside the token before it.
    """

    @classmethod
    def of(cls, micro_batch: TokenMicroBatch, split: SequenceSplit) -> LabelledTokens:
        """Fill up the rows of a micro-batch as the ranks need it, and take this rank's tokens."""
        data, labels = micro_batch
        ids, parallel = data["input_ids"], split.parallel
        if parallel.mode == "isp":
            return cls(labels, ids, _packed_isp(data, split))
        is_packed = "cu_seqlens" in data
        lengths = data["cu_seqlens"].diff().long() if is_packed else torch.tensor([ids.shape[1]])
        aligned = align_segments(
            lengths, multiple_of=parallel.row_multiple, segment_multiple_of=parallel.segment_multiple
        )
        filled, places = int(aligned.cu_seqlens[-1]), aligned.places.to(ids.device)
        if is_packed:
            packed = PackedSequence.packed(aligned.cu_seqlens, split, lengths=aligned.lengths, device=ids.device)
        else:
            rows, length = ids.shape
            packed = PackedSequence.unpacked(rows, length, split, filled=filled, device=ids.device)

        def own(whole: Tensor, padding: int) -> Tensor:
            return packed.own(whole.new_full((len(whole), filled), padding).index_copy_(1, places, whole))

        return cls(own(labels, IGNORED), own(ids, PAD_ID), packed)

    def output(self, own: OwnOutput) -> OwnOutput:
        return own


def _packed_isp(data: Data, split: SequenceSplit) -> PackedSequence:
    ids = data["input_ids"]
    if "cu_seqlens" in data:
        return PackedSequence.packed(data["cu_seqlens"], split, device=ids.device)
    rows, own_length = ids.shape
    return PackedSequence.unpacked(rows, own_length * split.ranks, split, device=ids.device)


def count_labels(
    micro_batches: Sequence[LabelledTokens], state: ParallelState, vocab_size: int, device: torch.device
) -> int:
    """Labels that are learned, of the whole step: all micro-batches of all ranks that have different tokens.

    Collective over these ranks.

    Raises:
        ValueError: on all of them alike, if one has ids or labels outside the vocabulary, or another number of
            micro-batches than the first: its gradients would be wrong, or waited for in vain.
    """
    counts = torch.zeros(3, dtype=torch.int64, device=device)  # micro-batches, labels, ids outside the vocabulary
    counts[0] = len(micro_batches)
    for tokens in micro_batches:
        learned = tokens.data[tokens.data != IGNORED]
        counts[1] += learned.numel()
        counts[2] += sum(((ids < 0) | (ids >= vocab_size)).sum() for ids in (tokens.input_ids, learned))
    everyone = [torch.empty_like(counts) for _ in range(state.megatron.dp_cp.size())]
    dist.all_gather(everyone, counts, group=state.megatron.dp_cp)
    numbers, labels, outside = torch.stack(everyone).T.tolist()
    if sum(outside):
        raise UserError(f"{sum(outside)} token ids or labels are outside the vocabulary of {vocab_size}")
    if len(set(numbers)) > 1:
        raise UserError(f"ranks have different numbers of micro-batches: {numbers}")
    return int(sum(labels))


def next_token_loss(num_labels: int, labels: Tensor, output: OwnOutput) -> Loss:
    """Sum of the cross-entropies of this rank's labels `[b, s]`, divided by `num_labels`, those of the whole step.

    Other ranks add those of their own labels, so the loss is a sum over the ranks of context parallelism too.
    """
    learned = labels != IGNORED
    log_probs, _ = output.log_probs(torch.where(learned, labels, 0), temperature=1.0)
    return -torch.where(learned, log_probs, 0.0).sum() / num_labels, {}
