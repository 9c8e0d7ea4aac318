"""All-to-all, split and gather: where every element goes, and what comes back under each reducer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from roll.parallel.sequence import (
    all_to_all,
    gather_tensor,
    get_sequence_parallel_group,
    sequence_parallel_groups,
    split_tensor,
)
from roll.parallel.sequence.collectives import gather_for_own_use
from tests.parallel.sequence.test_groups import refusal
from tests.rank_pool import RankPool


def coded(*shape: int) -> Tensor:
    """Every element tells its place."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def exchange() -> dict[str, Any]:
    """Three rows of eight tokens, four heads of size five: no two dims are equal, so that none can be mistaken."""
    with sequence_parallel_groups(dist.get_world_size()):
        n, rank = dist.get_world_size(), dist.get_rank()
        whole = coded(3, 8, 4, 5)
        tokens, heads = whole.chunk(n, 1)[rank], whole.chunk(n, 2)[rank]
        x = tokens.clone().requires_grad_()
        to_heads = all_to_all(x, scatter_dim=2, gather_dim=1)
        weight = coded(3, 8, 4, 5).cos()
        (to_heads * weight.chunk(n, 2)[rank]).sum().backward()
        moved = tokens.movedim(1, 3)
        return {
            "to heads": torch.equal(to_heads, heads),
            "and back": torch.equal(all_to_all(to_heads, scatter_dim=1, gather_dim=2), tokens),
            "negative dims": torch.equal(all_to_all(moved, 1, -1), heads.movedim(1, 3)),
            "backward": torch.equal(x.grad, weight.chunk(n, 1)[rank]),
        }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_element_finds_its_place(ranks: RankPool, size: int) -> None:
    for found in ranks.run(exchange, world_size=size):
        assert all(found.values()), found


def shapes_of_the_document() -> list[Any]:
    """(b, s, h, d) to (b, s * n, h / n, d) for attention, and back; attention of one process beside it."""
    with sequence_parallel_groups(dist.get_world_size()):
        n, rank = dist.get_world_size(), dist.get_rank()
        b, s, h, d = 2, 3, 8, 5
        whole = [coded(b, n * s, h, d).add(shift).sin() for shift in (0.0, 0.3, 0.7)]
        heads = [all_to_all(x.chunk(n, 1)[rank], scatter_dim=2, gather_dim=1) for x in whole]
        context = attention(*heads)
        back = all_to_all(context, scatter_dim=1, gather_dim=2)
        error = (back - attention(*whole).chunk(n, 1)[rank]).abs().max()
        return [tuple(heads[0].shape), tuple(context.shape), tuple(back.shape), float(error)]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, `[b, s, h, d]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_shapes_on_the_way_to_attention_and_back(ranks: RankPool, size: int) -> None:
    for to, context, back, error in ranks.run(shapes_of_the_document, world_size=size):
        assert to == context == (2, 3 * size, 8 // size, 5)
        assert back == (2, 3, 8, 5)
        assert error < 1e-14  # fp64; the same sums in the same order, up to the kernel's choice of blocks


def gradients_of(reducer: Any) -> dict[str, float]:
    """A weight w of which every rank has a copy; its reduced gradient beside that of one process."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x, target = coded(2, 8) / 16, coded(2, 8).cos()

    def reduced(weight: Tensor) -> Tensor:
        total = weight.grad.clone()
        dist.all_reduce(total)
        return total / n if reducer == "mean" else total

    found = {}
    with sequence_parallel_groups(n):
        one = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        (torch.tanh(one * x) * target).sum().square().backward()
        # Each part is computed by its rank; then all compute the same loss of the whole.
        w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        whole = gather_tensor(torch.tanh(w * x.chunk(n, 1)[rank]), reducer=reducer)
        (whole * target).sum().square().backward()
        found["gather"] = float((reduced(w) - one.grad).abs())
        # All compute the same; then each part is worked on by its rank, and the whole is gathered for the loss.
        w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        part = split_tensor(torch.tanh(w * x))
        (gather_tensor(part, reducer=reducer) * target).sum().square().backward()
        found["split"] = float((reduced(w) - one.grad).abs())
        # Every rank computes something else from the whole.
        w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        whole = gather_for_own_use(torch.tanh(w * x.chunk(n, 1)[rank]), 1, get_sequence_parallel_group())
        (whole * target * (rank + 1)).sum().backward()
        one.grad = None
        (torch.tanh(one * x) * target * (n * (n + 1) / 2)).sum().backward()
        total = w.grad.clone()
        dist.all_reduce(total)
        found["own use"] = float((total - one.grad).abs())
    return found


@pytest.mark.parametrize("reducer", ["mean", "sum"])
def test_gradients_of_one_process(ranks: RankPool, reducer: str) -> None:
    for found in ranks.run(gradients_of, reducer, world_size=4):
        assert max(found.values()) < 1e-12, found


def misuse() -> list[str]:
    rank = dist.get_rank()
    with sequence_parallel_groups(2):
        uneven = torch.ones(2, 4 + rank, 2)
        return [
            refusal(lambda: all_to_all(torch.ones(2, 4, 3))),
            refusal(lambda: all_to_all(torch.ones(2, 4, 4), 1, -2)),
            refusal(lambda: all_to_all(uneven)),
            refusal(lambda: gather_tensor(uneven)),
            refusal(lambda: all_to_all(torch.ones(2, 4, 4, dtype=(torch.float32, torch.float64)[rank]))),
            refusal(lambda: gather_tensor(torch.ones(2, 4, dtype=(torch.float32, torch.float64)[rank]))),
            refusal(lambda: split_tensor(torch.ones(2, 3))),
            refusal(lambda: gather_tensor(uneven, reducer="average")),  # type: ignore[arg-type]
        ]


def test_misuse_is_refused_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(misuse, world_size=2)
    assert first == second
    for text, expected in zip(
        first,
        [
            "dim 2 of (2, 4, 3) does not divide by the 2 ranks",
            "scatters and gathers the same dim 1",
            "shape differs between the ranks of the group: (2, 4, 2), (2, 5, 2)",
            "shape differs between the ranks of the group: (2, 4, 2), (2, 5, 2)",
            "dtype differs between the ranks of the group: torch.float32, torch.float64",
            "dtype differs between the ranks of the group: torch.float32, torch.float64",
            "dim 1 of (2, 3) does not divide by the 2 ranks that share a sequence",
            "reducer must be mean or sum, got 'average'",
        ],
        strict=True,
    ):
        assert expected in text
