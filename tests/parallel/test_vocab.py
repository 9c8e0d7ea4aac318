"""Log-probabilities and entropy over vocabulary shards, against torch's log_softmax of the whole vocabulary."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.parallel.vocab import vocab_parallel_log_probs
from tests.rank_pool import RankPool

TOKENS, VOCABULARY = 9, 20


@pytest.fixture(params=[1, 2, 4], ids=lambda size: f"tp{size}")
def tp(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


def on_shard(logits: Tensor, targets: Tensor, weights: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """One rank: results of its shard, and with `weights` the gradient of their weighted sum."""
    shard = logits.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].clone().requires_grad_()
    before = shard.detach().clone()
    assert dist.group.WORLD is not None
    log_probs, entropy = vocab_parallel_log_probs(shard, targets, dist.group.WORLD, with_entropy=weights is not None)
    if weights is None:
        log_probs.sum().backward()
    else:
        assert entropy is not None
        (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    return {
        "log_probs": log_probs.detach(),
        "entropy": None if entropy is None else entropy.detach(),
        "gradient": shard.grad,
        "unchanged": torch.equal(shard.detach(), before),
    }


def of_whole_vocabulary(logits: Tensor, targets: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """(log-probs, entropy, gradient of the weighted sum) in fp64."""
    whole = logits.double().requires_grad_()
    log_softmax = torch.log_softmax(whole, dim=-1)
    log_probs = log_softmax[torch.arange(len(targets)), targets]
    entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    (log_probs * weights[0].double() + entropy * weights[1].double()).sum().backward()
    assert whole.grad is not None
    return log_probs.detach(), entropy.detach(), whole.grad


def random_case(seed: int = 0) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Logits, targets that touch the first and last id of every shard, and unequal weights of the results."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(TOKENS, VOCABULARY, generator=generator)
    targets = torch.tensor([0, 4, 5, 9, 10, 14, 15, 19, 7])
    weights = torch.randn(TOKENS, generator=generator), torch.randn(TOKENS, generator=generator)
    return logits, targets, weights


def test_results_and_gradients_are_those_of_the_whole_vocabulary(ranks: RankPool, tp: int) -> None:
    logits, targets, weights = random_case()
    log_probs, entropy, gradient = of_whole_vocabulary(logits, targets, weights)
    outcomes = ranks.run(on_shard, logits, targets, weights, world_size=tp)
    for outcome in outcomes:
        assert outcome["log_probs"].dtype == outcome["entropy"].dtype == torch.float32
        torch.testing.assert_close(outcome["log_probs"].double(), log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outcome["entropy"].double(), entropy, rtol=1e-6, atol=1e-6)
    whole = torch.cat([outcome["gradient"] for outcome in outcomes], dim=-1)
    torch.testing.assert_close(whole.double(), gradient, rtol=1e-5, atol=1e-6)


def test_without_entropy(ranks: RankPool, tp: int) -> None:
    logits, targets, _ = random_case(seed=1)
    ones, zeros = torch.ones(TOKENS), torch.zeros(TOKENS)
    log_probs, _, gradient = of_whole_vocabulary(logits, targets, (ones, zeros))
    outcomes = ranks.run(on_shard, logits, targets, None, world_size=tp)
    for outcome in outcomes:
        assert outcome["entropy"] is None
        torch.testing.assert_close(outcome["log_probs"].double(), log_probs, rtol=1e-6, atol=1e-6)
    whole = torch.cat([outcome["gradient"] for outcome in outcomes], dim=-1)
    torch.testing.assert_close(whole.double(), gradient, rtol=1e-5, atol=1e-6)


def test_values_by_hand(ranks: RankPool, tp: int) -> None:
    # Row 0: probabilities 1/2, 1/4, 1/8, 1/8, of which ln 2 * (1/2 + 2/4 + 3/8 + 3/8) = 1.75 ln 2 is the entropy.
    # Row 1: uniform over four. Row 2: certain, so nothing is left to wonder about.
    logits = torch.tensor([[8.0, 4.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], [1e30, 1.0, 1.0, 1.0]]).log()
    ln2 = math.log(2)
    weights = torch.ones(3), torch.ones(3)
    for outcome in ranks.run(on_shard, logits, torch.tensor([2, 3, 0]), weights, world_size=tp):
        assert outcome["log_probs"].tolist() == pytest.approx([-3 * ln2, -2 * ln2, 0.0], abs=1e-6)
        assert outcome["entropy"].tolist() == pytest.approx([1.75 * ln2, 2 * ln2, 0.0], abs=1e-6)


def test_extreme_logits_stay_finite(ranks: RankPool, tp: int) -> None:
    # The last shards hold the low logits only; the last rows are all high or all low.
    high, low = 1e4, -1e4
    logits = torch.full((4, 8), low)
    logits[0, 0] = logits[1, :2] = high
    logits[2] = high
    targets = torch.tensor([0, 7, 3, 7])
    weights = torch.ones(4), torch.ones(4)
    log_probs, entropy, gradient = of_whole_vocabulary(logits, targets, weights)
    outcomes = ranks.run(on_shard, logits, targets, weights, world_size=tp)
    for outcome in outcomes:
        torch.testing.assert_close(outcome["log_probs"].double(), log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outcome["entropy"].double(), entropy, rtol=1e-6, atol=1e-6)
        assert outcome["gradient"].isfinite().all()
    whole = torch.cat([outcome["gradient"] for outcome in outcomes], dim=-1)
    torch.testing.assert_close(whole.double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_not_changed_and_results_are_fp32(ranks: RankPool, tp: int, dtype: torch.dtype) -> None:
    logits, targets, weights = random_case(seed=2)
    logits = logits.to(dtype)
    log_probs, entropy, _ = of_whole_vocabulary(logits, targets, weights)
    for outcome in ranks.run(on_shard, logits, targets, weights, world_size=tp):
        assert outcome["unchanged"]
        assert outcome["log_probs"].dtype == outcome["entropy"].dtype == torch.float32
        assert outcome["gradient"].dtype == dtype
        torch.testing.assert_close(outcome["log_probs"].double(), log_probs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outcome["entropy"].double(), entropy, rtol=1e-6, atol=1e-6)


def test_no_tokens(ranks: RankPool) -> None:
    nothing = torch.zeros(0)
    case = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), (nothing, nothing)
    for outcome in ranks.run(on_shard, *case, world_size=2):
        assert outcome["log_probs"].shape == outcome["entropy"].shape == (0,)
        assert outcome["gradient"].shape == (0, 2)
