"""Attention over a split sequence, by itself and in fp64: context and gradients of a plain loop over the segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from roll.config import ParallelSettings
from roll.data.packing import align_segments
from roll.data.sequence_split import SequenceSplit
from roll.models import partial_attention
from roll.models.gpt import core_attention
from roll.models.packed_sequence import PackedSequence
from roll.models.partial_attention import attend_partly, merge, partial_gradients
from roll.models.segments import Segments
from roll.parallel.ring import Ring
from roll.parallel.sequence_gather import gather_sequence
from roll.parallel.state import parallel_groups
from tests.rank_pool import RankPool

HEAD_DIM = 6
Case = tuple[int, int, tuple[int, ...], int]
"""Query heads, key-value heads, lengths of the segments of a row, rows."""


def cases(cp: int) -> list[Case]:
    everything = tuple(range(1, 4 * cp + 2))  # from one token to a token more than two in each chunk
    return [
        (4, 4, everything, 1),
        (4, 2, everything[::-1], 1),
        (8, 1, (3, 40, 1, 1), 1),  # one key-value head for all ranks
        (4, 2, (1,), 1),  # shorter than the ranks
        (4, 2, (13,), 3),  # rows side by side
    ]


def plain(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """`[T, heads, d]`, from the definition."""
    groups = query.shape[1] // key.shape[1]
    contexts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        contexts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(contexts)


def errors_of(case: Case, parallel: ParallelSettings, state: Any) -> list[float]:
    """Largest errors, of numbers around 1, of the context and of the gradients of q, k and v, where tokens are real."""
    heads, kv_heads, lengths, rows = case
    split = SequenceSplit(parallel, state.cp.rank())
    aligned = align_segments(
        torch.tensor(lengths), multiple_of=parallel.row_multiple, segment_multiple_of=parallel.segment_multiple
    )
    total = int(aligned.cu_seqlens[-1])
    draw = torch.Generator().manual_seed(len(lengths))
    shapes = [(heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, HEAD_DIM), (heads * HEAD_DIM,)]
    # Filling holds numbers, too: large ones, that would be seen.
    query, key, value, weights = (
        torch.full((rows, total, *shape), 30.0, dtype=torch.float64).index_copy_(
            1, aligned.places, torch.randn(rows, sum(lengths), *shape, generator=draw, dtype=torch.float64)
        )
        for shape in shapes
    )

    wholes = [x[:, aligned.places].flatten(0, 1).requires_grad_() for x in (query, key, value)]
    context = plain(*wholes, list(lengths) * rows)
    (context.flatten(1) * weights[:, aligned.places].flatten(0, 1)).sum().backward()
    expected = [context.flatten(1), *(whole.grad for whole in wholes)]

    packed = (
        PackedSequence.packed(aligned.cu_seqlens, split, lengths=aligned.lengths)
        if rows == 1
        else PackedSequence.unpacked(rows, lengths[0], split, filled=total)
    )
    is_real = torch.zeros(rows, total, 1, dtype=torch.float64).index_fill_(1, aligned.places, 1.0)
    owns = [packed.own(x).transpose(0, 1).clone().requires_grad_() for x in (query, key, value)]
    attention = core_attention(parallel)(None, 1, AttnMaskType.causal, "self", pg_collection=state.megatron)
    own_context = attention(*owns, None, packed_seq_params=packed)
    (own_context * packed.own(weights * is_real).transpose(0, 1)).sum().backward()

    errors = []
    for own, whole in zip([own_context, *(x.grad for x in owns)], expected, strict=True):
        assert own is not None and whole is not None
        gathered = packed.held.in_order(gather_sequence(own.detach().transpose(0, 1), state.cp), dim=1)
        real = gathered[:, aligned.places].flatten(0, 1)
        errors.append(float((real - whole).detach().abs().max()))
    # Nothing reaches the filling's keys and values from real queries, not even the least.
    filled = packed.own(1 - is_real).transpose(0, 1).bool().squeeze(-1)
    for x in owns:
        assert x.grad is not None
        errors.append(float(x.grad[filled].abs().sum()))
    return errors


def largest_errors(cp: int) -> dict[str, float]:
    found = {}
    for cp_comm in ("a2a", "all_gather", "ring"):
        parallel = ParallelSettings.model_validate({"cp": cp, "cp_comm": cp_comm})
        with parallel_groups(parallel) as state:
            for case in cases(cp):
                found[f"{cp_comm} {case}"] = max(errors_of(case, parallel, state))
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_context_and_gradients_are_those_of_the_definition(ranks: RankPool, cp: int) -> None:
    for found in ranks.run(largest_errors, cp, world_size=cp):
        for name, error in found.items():
            assert error <= 1e-12, f"{name}: {error:.2e}"


def test_no_more_than_some_queries_have_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    lengths, here = torch.tensor([7, 3]), torch.device("cpu")
    query, key, value, gradient = (torch.randn(10, 2, HEAD_DIM, generator=draw).double() for _ in range(4))
    segments = Segments(lengths, lengths, here)

    def results() -> tuple[Tensor, ...]:
        whole = attend_partly(query, key, value, segments, None)
        return *whole, *partial_gradients(gradient, query, key, value, whole, segments, None)

    at_once = results()
    monkeypatch.setattr(partial_attention, "QUERIES_AT_ONCE", 2)
    for actual, expected in zip(results(), at_once, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_parts_merge_to_the_whole_however_large_the_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (40 * torch.randn(4, 2, HEAD_DIM, generator=draw) for _ in range(3))
    four, two = torch.tensor([4]), torch.tensor([2])
    here = torch.device("cpu")
    whole = attend_partly(query, key, value, Segments(four, four, here, causal=False), None)
    parts = [
        attend_partly(query, key[half], value[half], Segments(four, two, here, causal=False), None)
        for half in (slice(0, 2), slice(2, 4))
    ]
    for actual, expected in zip(merge(parts[0], parts[1]), whole, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def handed_on() -> list[int]:
    """What arrives at this rank in each step, while two things are on their way."""
    ring = Ring(dist.group.WORLD)
    at_hand, arrived = torch.tensor([dist.get_rank()]), []
    for _ in range(ring.size):
        first, second = ring.pass_on(at_hand), ring.pass_on(at_hand.repeat(3) + 10)
        at_hand = first.wait()
        arrived += [int(at_hand), *second.wait().tolist()]
    return arrived


def test_a_ring_hands_on_to_the_next_rank(ranks: RankPool) -> None:
    for rank, arrived in enumerate(ranks.run(handed_on, world_size=3)):
        senders = [(rank - step) % 3 for step in (1, 2, 3)]
        assert arrived == [number for sender in senders for number in (sender, *[sender + 10] * 3)]
