"""KL estimators against exact divergences, and controllers against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import AdaptiveKLController, FixedKLController, KLEstimator, make_kl_controller, token_kl
from tests.algorithms.masks import grad, masks, numbers, spoil

ESTIMATORS = get_args(KLEstimator)


def scalar(estimator: str, log_prob: float, ref_log_prob: float) -> float:
    """The estimators of the note, with r = reference / policy."""
    r = math.exp(ref_log_prob - log_prob)
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r), "abs": abs(math.log(r))}[
        estimator
    ]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5), ("abs", math.log(2))],
)
def test_by_hand_where_the_policy_is_twice_the_reference(estimator: KLEstimator, expected: float) -> None:
    kl = token_kl(torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log(), torch.ones(1, 1), estimator)
    assert kl.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_have_the_exact_divergence_as_mean(estimator: KLEstimator) -> None:
    policy, reference = torch.tensor([[0.7, 0.2, 0.1]]).double(), torch.tensor([[0.2, 0.3, 0.5]]).double()
    exact = (policy * (policy / reference).log()).sum()
    per_token = token_kl(policy.log(), reference.log(), torch.ones(1, 3), estimator)
    torch.testing.assert_close((policy * per_token).sum(), exact)


@given(masks(), st.integers(0, 99), st.sampled_from(ESTIMATORS))
def test_masked_garbage_reaches_neither_value_nor_gradient(mask: Tensor, seed: int, estimator: KLEstimator) -> None:
    log_probs, reference = -numbers(mask, seed).abs(), -numbers(mask, seed + 1).abs()
    trained = spoil(log_probs, mask).requires_grad_()
    kl = token_kl(trained, -spoil(-reference, mask), mask, estimator)
    kl.sum().backward()
    assert grad(trained).isfinite().all()
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            expected = scalar(estimator, log_probs[b, t].item(), reference[b, t].item()) if mask[b, t] else 0.0
            assert kl[b, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert mask[b, t] or grad(trained)[b, t] == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_against_finite_differences(estimator: KLEstimator) -> None:
    reference = torch.tensor([[-1.0, -2.0, -0.3]]).double()
    log_probs = torch.tensor([[-1.5, -0.7, -0.4]]).double().requires_grad_()
    mask = torch.tensor([[1, 0, 1]])
    assert torch.autograd.gradcheck(lambda trained: token_kl(trained, reference, mask, estimator), log_probs)


def test_k3_of_nearly_equal_policies_keeps_its_digits() -> None:
    log_probs, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.0 + 2.0**-12]])
    difference = 2.0**-12
    kl = token_kl(log_probs, reference, torch.ones(1, 1), "k3")
    assert kl.item() == pytest.approx(difference**2 / 2, rel=1e-3)


def test_k3_is_bounded_as_verls_is() -> None:
    # e^x - 1 - x, of x within +-20, at most 10: e^100 and e^3 - 4 = 16.1 are over it, and so is 30 - 1 of -30.
    log_ratios = torch.tensor([[100.0, 3.0, 2.0, -5.0, -30.0, 0.0]])
    log_probs = torch.zeros(1, 6, requires_grad=True)
    kl = token_kl(log_probs, log_ratios, torch.ones(1, 6), "k3")
    expected = [10.0, 10.0, math.exp(2) - 3, math.exp(-5) + 4, 10.0, 0.0]
    assert kl[0].tolist() == pytest.approx(expected, rel=1e-6)
    kl.sum().backward()  # By the policy's log-prob: 1 - r, and 0 where the bound holds.
    assert grad(log_probs)[0].tolist() == pytest.approx([0, 0, 1 - math.exp(2), 1 - math.exp(-5), 0, 0], rel=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_log_prob_that_is_not_finite_is_refused_with_its_row(estimator: KLEstimator) -> None:
    good, bad = torch.full((3, 2), -1.0), torch.full((3, 2), -1.0)
    bad[1, 0] = math.nan  # masked
    bad[2, 1] = -math.inf
    mask = torch.tensor([[1, 1], [0, 1], [1, 1]])
    with pytest.raises(ValueError, match=r"^ref_log_probs: row 2 has -inf, which is not finite$"):
        token_kl(good, bad, mask, estimator)
    with pytest.raises(ValueError, match=r"^log_probs: row 2 has -inf, which is not finite$"):
        token_kl(bad, good, mask, estimator)


def test_unknown_estimator_and_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kl.estimator must be one of k1, k2, k3, abs, got 'k4'"):
        token_kl(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ref_log_probs \[1, 3\]"):
        token_kl(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2), "k1")


def test_fixed_controller_stays() -> None:
    controller = make_kl_controller("fixed", 0.05)
    controller.update(100.0, 1000)
    assert isinstance(controller, FixedKLController) and controller.value == 0.05
    other = make_kl_controller("fixed", 0.07)
    other.load_state_dict(controller.state_dict())
    assert other.value == 0.07  # its coefficient is a setting, not a state


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.11, 1 + 0.1 * 0.5),  # 10 % above the target
        (0.095, 1 - 0.05 * 0.5),
        (50.0, 1 + 0.2 * 0.5),  # clipped
        (-3.0, 1 - 0.2 * 0.5),  # k1 may average below zero
        (0.1, 1.0),
    ],
)
def test_adaptive_controller_by_hand(kl: float, expected: float) -> None:
    controller = AdaptiveKLController(coef=2.0, target=0.1, horizon=100)
    controller.update(kl, num_samples=50)
    assert controller.value == pytest.approx(2.0 * expected, rel=1e-12)


def test_adaptive_controller_continues_from_its_state() -> None:
    first = make_kl_controller("adaptive", 0.1, target=1.0, horizon=100)
    first.update(2.0, 64)
    second = make_kl_controller("adaptive", 0.1, target=1.0, horizon=100)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.9, 64)
    assert first.value == second.value == pytest.approx(0.1 * (1 + 0.2 * 0.64) * (1 - 0.1 * 0.64))


@given(st.lists(st.floats(-10, 10), max_size=30), st.integers(1, 499))
def test_adaptive_weight_stays_above_zero(divergences: list[float], num_samples: int) -> None:
    controller = AdaptiveKLController(coef=0.1, target=0.5, horizon=100)
    for kl in divergences:
        controller.update(kl, num_samples)
        assert controller.value > 0


def test_adaptive_weight_neither_vanishes_nor_overflows() -> None:
    for kl, bound in ((0.0, 1e-30), (9.0, 1e30)):
        controller = AdaptiveKLController(coef=0.1, target=0.5, horizon=10)
        for _ in range(2000):
            controller.update(kl, 40)
        assert controller.value == bound


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_state_without_a_usable_weight_is_refused(value: float) -> None:
    controller = AdaptiveKLController(coef=0.1, target=0.5, horizon=100)
    with pytest.raises(ValueError, match=f"weight {value}, it must be a finite number above 0"):
        controller.load_state_dict({"kind": "adaptive", "value": value})
    assert controller.value == 0.1


def test_adaptive_controller_refuses_what_would_spoil_it() -> None:
    controller = AdaptiveKLController(coef=0.1, target=0.5, horizon=100)
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match=str(kl)):
            controller.update(kl, 8)
    with pytest.raises(ValueError, match=r"kl.horizon 100 is too short for 500 samples.*above 100"):
        controller.update(0.0, 500)
    with pytest.raises(ValueError, match="-1"):
        controller.update(0.5, -1)
    assert controller.value == 0.1


def test_controller_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"kl.coef.*-1"):
        make_kl_controller("fixed", -1.0)
    with pytest.raises(ValueError, match=r"kl.target and kl.horizon, got None and 10"):
        make_kl_controller("adaptive", 0.1, horizon=10)
    for name, settings in {"coef": (0.0, 1.0, 1.0), "target": (1.0, 0.0, 1.0), "horizon": (1.0, 1.0, math.inf)}.items():
        with pytest.raises(ValueError, match=f"kl.{name} must"):
            make_kl_controller("adaptive", *settings)
    with pytest.raises(ValueError, match=r"kl.kind must be one of fixed, adaptive, got 'pid'"):
        make_kl_controller("pid", 0.1)  # type: ignore[arg-type]
    adaptive = make_kl_controller("adaptive", 0.1, 1.0, 100)
    with pytest.raises(ValueError, match=r"'adaptive'.*'fixed'"):
        adaptive.load_state_dict(make_kl_controller("fixed", 0.1).state_dict())
    with pytest.raises(ValueError, match=r"'fixed'.*'adaptive'"):
        make_kl_controller("fixed", 0.1).load_state_dict(adaptive.state_dict())
