"""The reduced loss and its gradient, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.parallel.sequence import reduce_sequence_parallel_loss, sequence_parallel_groups
from tests.parallel.sequence.test_groups import refusal
from tests.rank_pool import RankPool


def reduce_cases(cases: list[tuple[list[float], list[int], dict[str, Any]]]) -> list[tuple[float, float, int]]:
    """(loss, gradient of the own mean loss, tokens afterwards) of each case, in groups of two."""
    found = []
    with sequence_parallel_groups(2):
        for means, counts, settings in cases:
            rank = dist.get_rank()
            mean = torch.tensor(means[rank], requires_grad=True)
            tokens = torch.tensor(counts[rank])
            if settings.get("group") == "world":
                settings = settings | {"group": dist.group.WORLD}
            loss = reduce_sequence_parallel_loss(mean, tokens, **settings)
            loss.backward()
            assert mean.grad is not None
            found.append((float(loss.detach()), float(mean.grad), int(tokens)))
    return found


def test_by_hand(ranks: RankPool) -> None:
    """Three tokens of mean 2 and one of mean 6: (3*2 + 1*6)/4 = 3, with weights 3/4 and 1/4.

    Averaged over two ranks a gradient needs twice its weight. The second pair of ranks has numbers of its own.
    """
    nan = math.nan
    cases: list[tuple[list[float], list[int], dict[str, Any]]] = [
        ([2.0, 6.0, 1.0, 3.0], [3, 1, 2, 2], {}),
        ([2.0, 6.0, 1.0, 3.0], [3, 1, 2, 2], {"reducer": "sum"}),
        ([2.0, nan, nan, 5.0], [4, 0, 0, 1], {}),
        ([nan, nan, nan, nan], [0, 0, 0, 0], {}),
        ([2.0, 6.0, 1.0, 3.0], [3, 1, 2, 2], {"total_tokens": 8}),
        ([2.0, 6.0, 1.0, 3.0], [3, 1, 2, 2], {"group": "world"}),
    ]
    found = ranks.run(reduce_cases, cases, world_size=4)
    expected = [
        ([3.0, 3.0, 2.0, 2.0], [1.5, 0.5, 1.0, 1.0]),
        ([3.0, 3.0, 2.0, 2.0], [0.75, 0.25, 0.5, 0.5]),
        ([2.0, 2.0, 5.0, 5.0], [2.0, 0.0, 0.0, 2.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([1.5, 1.5, 1.0, 1.0], [0.75, 0.25, 0.5, 0.5]),
        ([2.5, 2.5, 2.5, 2.5], [1.5, 0.5, 1.0, 1.0]),  # 20 / 8; four ranks times 3/8, 1/8, 2/8, 2/8
    ]
    for case, (losses, gradients) in enumerate(expected):
        assert [rank[case][0] for rank in found] == losses, cases[case]
        assert [rank[case][1] for rank in found] == gradients, cases[case]
        assert [rank[case][2] for rank in found] == cases[case][1]  # the counts are not changed


def test_alone_it_is_the_loss_itself() -> None:
    """As a user without init has it; a NaN over no tokens is zero, one over tokens stays."""
    mean = torch.tensor([2.0], requires_grad=True)
    loss = reduce_sequence_parallel_loss(mean, 7)
    loss.backward()
    assert (float(loss.detach()), float(mean.grad)) == (2.0, 1.0)  # type: ignore[arg-type]
    assert float(reduce_sequence_parallel_loss(torch.tensor(math.nan), 0)) == 0.0
    assert math.isnan(float(reduce_sequence_parallel_loss(torch.tensor(math.nan), 1)))
    assert reduce_sequence_parallel_loss(torch.tensor(1.0, dtype=torch.bfloat16), 3).dtype == torch.bfloat16


def test_a_mean_by_hand_over_no_tokens() -> None:
    """Weight zero times the derivative of 0 / 0 is NaN; with clamp(min=1) the gradients are zero."""
    for smallest, finite in ((1, True), (0, False)):
        weights = torch.ones(3, requires_grad=True)
        mask = torch.zeros(3)
        loss = reduce_sequence_parallel_loss((weights * mask).sum() / mask.sum().clamp(min=smallest), mask.sum())
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert weights.grad is not None
        assert torch.equal(weights.grad, torch.zeros(3)) == finite
        assert bool(weights.grad.isnan().all()) != finite


def misuse() -> list[str]:
    own, one = dist.get_rank(), torch.tensor(1.0)
    with sequence_parallel_groups(2):
        return [
            refusal(lambda: reduce_sequence_parallel_loss(torch.ones(2), 1)),
            refusal(lambda: reduce_sequence_parallel_loss(torch.tensor(1.0), torch.ones(2))),
            refusal(lambda: reduce_sequence_parallel_loss(torch.tensor(1.0), 1, reducer="none")),  # type: ignore[arg-type]
            refusal(lambda: reduce_sequence_parallel_loss(torch.ones(2) if own else one, 1)),
            refusal(lambda: reduce_sequence_parallel_loss(one, 1, total_tokens=torch.ones(2) if own else 3)),
            refusal(lambda: reduce_sequence_parallel_loss(one, 1, total_tokens=8 + own)),
            refusal(lambda: reduce_sequence_parallel_loss(one, 1, total_tokens=8 if own else None)),
            refusal(lambda: reduce_sequence_parallel_loss(one, 1, reducer="sum" if own else "mean")),
            refusal(lambda: reduce_sequence_parallel_loss(one, None if own else 3)),  # type: ignore[arg-type]
            refusal(lambda: reduce_sequence_parallel_loss(1.0 if own else one, 3)),  # type: ignore[arg-type]
        ]


def test_misuse(ranks: RankPool) -> None:
    for found in ranks.run(misuse, world_size=2):
        assert found == [
            "UserError: mean_loss must be a scalar, got shape (2,)",
            "UserError: num_tokens must be one number, got shape (2,)",
            "UserError: reducer must be mean or sum, got 'none'",
            "UserError: rank 1 of the group: mean_loss must be a scalar, got shape (2,)",
            "UserError: rank 1 of the group: total_tokens must be one number, got shape (2,)",
            "UserError: total_tokens differs between the ranks of the group: 8.0, 9.0",
            "UserError: total_tokens differs between the ranks of the group: None, 8.0",
            "UserError: reducer differs between the ranks of the group: 'mean', 'sum'",
            "UserError: rank 1 of the group: num_tokens must be a number, got NoneType",
            "UserError: rank 1 of the group: mean_loss must be a tensor, got float",
        ]


@pytest.mark.parametrize("reducer", ["mean", "sum"])
def test_the_reducer_is_named(reducer: Any) -> None:
    """It is never read off the surroundings: alone both are the same, and both are accepted."""
    assert float(reduce_sequence_parallel_loss(torch.tensor(2.0), 1, reducer=reducer)) == 2.0
