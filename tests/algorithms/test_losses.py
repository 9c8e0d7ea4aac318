"""Losses against scalar loops, their gradients against finite differences, and what masked places must not do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import LossAggregation, aggregate_loss, cross_entropy, entropy_loss, policy_loss, value_loss
from roll.protocol.normalizers import count_loss_tokens
from tests.algorithms.masks import grad, masks, numbers, spoil

MODES = get_args(LossAggregation)
inf, nan = math.inf, math.nan


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_policy_loss_by_hand() -> None:
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 2, -2, 2, -2, 2 and clips 0.2 (low) and 0.3 (high).
    log_probs = log(0.6, 0.6, 0.2, 0.2, 0.44).requires_grad_()
    loss, diagnostics = policy_loss(
        log_probs, log(0.4, 0.4, 0.4, 0.4, 0.4), row(2, -2, 2, -2, 2), torch.ones(1, 5), clip_low=0.2, clip_high=0.3
    )
    torch.testing.assert_close(loss.detach(), row(-2.6, 3.0, -1.0, 1.6, -2.2))
    torch.testing.assert_close(diagnostics["ratio"], row(1.5, 1.5, 0.5, 0.5, 1.1))
    assert diagnostics["clipped"].tolist() == [[1, 0, 0, 1, 0]]
    torch.testing.assert_close(diagnostics["approx_kl"], -row(1.5, 1.5, 0.5, 0.5, 1.1).log())
    loss.sum().backward()
    # Where not clipped, the gradient is -A * ratio; where clipped, exactly zero.
    torch.testing.assert_close(grad(log_probs), row(0.0, 3.0, -1.0, 0.0, -2.2))


def test_on_policy_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    log_probs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    advantages = torch.arange(12.0).reshape(3, 4) - 6
    loss, diagnostics = policy_loss(log_probs, log_probs.detach().clone(), advantages, torch.ones(3, 4))
    loss.sum().backward()
    assert torch.equal(diagnostics["ratio"], torch.ones(3, 4))
    assert torch.equal(grad(log_probs), -advantages)
    assert not diagnostics["clipped"].any() and not diagnostics["approx_kl"].any()


def policy_loop(log_prob: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(log_prob - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def value_loop(value: float, old: float, target: float, clip: float | None) -> float:
    near = value if clip is None else old + min(max(value - old, -clip), clip)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


@given(masks(), st.integers(0, 99), st.floats(0, 1), st.floats(0, 3))
def test_policy_loss_equals_a_loop_whatever_is_masked(mask: Tensor, seed: int, low: float, high: float) -> None:
    log_probs, old, advantages = (numbers(mask, seed + i) for i in range(3))
    trained = spoil(log_probs, mask).requires_grad_()
    # Opposite garbage, so that differences of inf and of 1e30 occur as well.
    loss, diagnostics = policy_loss(trained, -spoil(-old, mask), spoil(advantages, mask), mask, low, high)
    loss.sum().backward()
    for b, t in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(mask.shape[1])).tolist():
        at = (b, t)
        if mask[at]:
            expected = policy_loop(log_probs[at].item(), old[at].item(), advantages[at].item(), low, high)
            assert loss[at].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        else:
            assert loss[at] == 0 and grad(trained)[at] == 0
            assert all(diagnostic[at] == 0 for diagnostic in diagnostics.values())
    assert grad(trained).isfinite().all()


@given(masks(), st.integers(0, 99), st.sampled_from([None, 0.1, 0.5]))
def test_value_loss_equals_a_loop_whatever_is_masked(mask: Tensor, seed: int, clip: float | None) -> None:
    values, old, returns = (numbers(mask, seed + i) for i in range(3))
    trained = spoil(values, mask).requires_grad_()
    loss, diagnostics = value_loss(trained, spoil(old, mask), -spoil(-returns, mask), mask, clip)
    loss.sum().backward()
    for b, t in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(mask.shape[1])).tolist():
        at = (b, t)
        if mask[at]:
            expected = value_loop(values[at].item(), old[at].item(), returns[at].item(), clip)
            assert loss[at].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        else:
            assert loss[at] == 0 and grad(trained)[at] == 0 and diagnostics["clipped"][at] == 0
    assert grad(trained).isfinite().all()


def test_value_loss_by_hand() -> None:
    # Moved 1.0 from the old value, allowed 0.2: towards the target (clipped), beyond it (not), and a small move.
    values = row(1.0, 1.0, 0.1).requires_grad_()
    loss, diagnostics = value_loss(values, row(0.0, 0.0, 0.0), row(2.0, -1.0, 2.0), torch.ones(1, 3), value_clip=0.2)
    torch.testing.assert_close(loss.detach(), row(0.5 * 1.8**2, 0.5 * 2.0**2, 0.5 * 1.9**2))
    assert diagnostics["clipped"].tolist() == [[1, 0, 0]]
    loss.sum().backward()
    torch.testing.assert_close(grad(values), row(0.0, 2.0, -1.9))


def test_entropy_and_cross_entropy_by_hand() -> None:
    log_probs = row(-2.0, -inf, -0.5).requires_grad_()
    mask = torch.tensor([[1, 0, 1]])
    loss = cross_entropy(log_probs, mask)
    loss.sum().backward()
    assert loss.tolist() == [[2.0, 0.0, 0.5]] and grad(log_probs).tolist() == [[-1.0, 0.0, -1.0]]
    entropy = row(1.5, nan, 0.5).requires_grad_()
    loss = entropy_loss(entropy, mask)
    loss.sum().backward()
    assert loss.tolist() == [[-1.5, 0.0, -0.5]] and grad(entropy).tolist() == [[-1.0, 0.0, -1.0]]


def test_gradients_against_finite_differences() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1, 1]])
    old, advantages = row(-1, -1, -1, -1, -1, -1), row(1, 1, -1, 1, -1, 0.5)
    log_probs = row(-0.5, -0.3, -0.5, -1.5, -1.5, -1.05).requires_grad_()
    assert torch.autograd.gradcheck(lambda trained: policy_loss(trained, old, advantages, mask)[0], log_probs)
    returns = row(2, 0, -2, 2, -2, 0.5)
    for clip in (None, 0.2):
        values = row(-0.5, -0.3, -0.5, -1.5, -1.5, -1.05).requires_grad_()
        assert torch.autograd.gradcheck(lambda trained, c=clip: value_loss(trained, old, returns, mask, c)[0], values)


def test_an_enormous_ratio_stays_finite() -> None:
    log_probs = torch.tensor([[0.0, 0.0, -200.0, -inf]], requires_grad=True)
    old = torch.tensor([[-200.0, -200.0, 0.0, -1.0]])
    loss, _ = policy_loss(log_probs, old, torch.tensor([[1.0, -1.0, 1.0, 1.0]]), torch.ones(1, 4))
    loss.sum().backward()
    assert loss.isfinite().all() and grad(log_probs).tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert loss[0, 0].item() == pytest.approx(-1.2)


def test_a_fault_at_a_kept_token_is_not_hidden() -> None:
    faulty, good, mask = row(nan, -1.0), row(-1.0, -1.0), torch.ones(1, 2)
    assert policy_loss(faulty, good, good, mask)[0].isnan().tolist() == [[True, False]]
    assert value_loss(faulty, good, good, mask, 0.2)[0].isnan().tolist() == [[True, False]]
    assert cross_entropy(faulty, mask).isnan().tolist() == [[True, False]]


def test_only_the_trained_output_gets_a_gradient_and_inputs_stay_as_they_are() -> None:
    mask = torch.tensor([[1, 1, 0]])
    trained, old, target = (row(-0.5, -1.0, -1.5).requires_grad_() for _ in range(3))
    losses = [policy_loss(trained, old, target, mask), value_loss(trained, old, target, mask, 0.1)]
    for loss, diagnostics in losses:
        loss.sum().backward()
        assert not any(diagnostic.requires_grad for diagnostic in diagnostics.values())
    assert grad(trained).any() and old.grad is None and target.grad is None
    assert all(tensor._version == 0 for tensor in (trained, old, target, mask))


def actor(trained: Tensor, old: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return policy_loss(trained, old, target, mask)[0] + 0.1 * entropy_loss(trained.square(), mask)


def critic(trained: Tensor, old: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return value_loss(trained, old, target, mask, 0.3)[0]


def supervised(trained: Tensor, old: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return cross_entropy(trained, mask)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_of", [actor, critic, supervised])
@pytest.mark.parametrize("shares", [[[0, 1, 2, 3, 4]], [[4], [0, 1, 2, 3]], [[3, 0], [2], [], [1, 4]]])
def test_micro_batches_add_up_to_the_naive_step(
    loss_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], mode: LossAggregation, shares: list[list[int]]
) -> None:
    """Loss and weight gradient of a small model equal those of a loop over single tokens in one graph."""
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]])
    inputs, old, target = (numbers(mask, seed) for seed in (1, 2, 3))
    normalizers = count_loss_tokens(mask)

    def model(weight: Tensor, rows: list[int]) -> Tensor:
        return torch.tanh(inputs[rows] * weight[0]) + weight[1]

    weight = row(0.3, -0.2)[0].requires_grad_()
    total = 0.0
    for rows in shares:
        trained = model(weight, rows)
        per_token = loss_of(trained, old[rows], target[rows], mask[rows])
        loss = aggregate_loss(per_token, mask[rows], normalizers, mode)
        loss.backward()
        total += loss.item()

    naive_weight = row(0.3, -0.2)[0].requires_grad_()
    output = model(naive_weight, [0, 1, 2, 3, 4])
    by_row = []
    for b in (0, 1, 3, 4):
        kept = [t for t in range(4) if mask[b, t]]
        by_row.append([loss_of(*(x[b : b + 1, t : t + 1] for x in (output, old, target, mask))) for t in kept])
    if mode == "token-mean":
        tokens = [token for tokens in by_row for token in tokens]
        naive = sum(tokens) / len(tokens)
    elif mode == "seq-mean-token-sum":
        naive = sum(sum(tokens) for tokens in by_row) / 4
    else:
        naive = sum(sum(tokens) / len(tokens) for tokens in by_row) / 4
    assert isinstance(naive, Tensor)
    naive.sum().backward()
    assert total == pytest.approx(naive.item(), rel=1e-12)
    torch.testing.assert_close(grad(weight), grad(naive_weight), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"clip_low": -0.1}, "clip_low.*-0.1"), ({"clip_low": 1.5}, "clip_low.*1.5"), ({"clip_high": nan}, "clip_high")],
)
def test_policy_clips_outside_their_range_are_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        policy_loss(row(0), row(0), row(0), row(1), **settings)


def test_value_clip_and_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"value_clip.*got 0"):
        value_loss(row(0), row(0), row(0), row(1), value_clip=0)
    with pytest.raises(ValueError, match=r"log_probs \[1, 2\], old_log_probs \[1, 1\]"):
        policy_loss(row(0, 0), row(0), row(0, 0), row(1, 1))
    with pytest.raises(ValueError, match=r"returns \[1, 1\]"):
        value_loss(row(0, 0), row(0, 0), row(0), row(1, 1))
