"""Token rewards and advantages against loops over single trajectories."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import generalized_advantage_estimation, token_rewards
from tests.algorithms.masks import masks, numbers, spoil


def loop_over_trajectories(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the paper's equation 16, written out over the kept tokens of each row."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        kept = [t for t in range(mask.shape[1]) if mask[b, t]]
        value = [values[b, t] for t in kept] + [0.0]
        deltas = [rewards[b, t] + gamma * value[i + 1] - value[i] for i, t in enumerate(kept)]
        for i, t in enumerate(kept):
            advantages[b, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(kept)))
            returns[b, t] = advantages[b, t] + value[i]
    return advantages, returns


def test_token_rewards_by_hand() -> None:
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0], [4.0, 9.0, 5.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0]), kl, 0.5, mask)
    assert rewards.tolist() == [[0.0, -0.5, 9.0, 0.0], [-2.0, 0.0, 17.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


@given(masks(), st.integers(0, 99), st.sampled_from([0.0, 0.3]))
def test_token_rewards_equal_a_loop(mask: Tensor, seed: int, kl_coef: float) -> None:
    kl = numbers(mask, seed)
    scores = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=len(mask)))
    expected = np.zeros(tuple(mask.shape))
    for b in range(len(mask)):
        kept = np.flatnonzero(mask[b].numpy())
        expected[b, kept] = -kl_coef * kl[b, kept]
        if len(kept):
            expected[b, kept[-1]] += scores[b]
    rewards = token_rewards(scores, spoil(kl, mask), kl_coef, mask)
    np.testing.assert_allclose(rewards.numpy(), expected, rtol=1e-12, atol=0)


def test_a_score_without_a_response_goes_nowhere() -> None:
    rewards = token_rewards(torch.tensor([float("nan"), 2.0]), torch.zeros(2, 2), 0.1, torch.tensor([[0, 0], [1, 0]]))
    assert rewards.tolist() == [[0.0, 0.0], [2.0, 0.0]]


def test_a_weight_of_zero_looks_at_no_kl() -> None:
    kl = torch.tensor([[torch.inf, torch.nan, 1.0]])
    assert token_rewards(torch.tensor([2.0]), kl, 0.0, torch.ones(1, 3)).tolist() == [[0.0, 0.0, 2.0]]


def test_rewards_that_are_not_finite_are_refused_with_their_row() -> None:
    scores, kl, mask = torch.tensor([1.0, torch.inf]), torch.zeros(2, 2), torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"^scores: row 1 has inf, which is not finite$"):
        token_rewards(scores, kl, 0.0, mask)
    kl[0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"^kl: row 0 has nan, which is not finite$"):
        token_rewards(torch.ones(2), kl, 0.1, mask)
    kl[0, 1] = 1e38  # Finite, but fp32 ends at 3.4e38.
    with pytest.raises(ValueError, match=r"^rewards: row 0 has -inf, which is not finite$"):
        token_rewards(torch.ones(2), kl, 10.0, mask)


def test_values_and_advantages_that_are_not_finite_are_refused_with_their_row() -> None:
    rewards, values, mask = torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor([[1, 0], [1, 1]])
    values[0, 1] = torch.nan  # masked
    rewards[1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^rewards: row 1 has nan, which is not finite$"):
        generalized_advantage_estimation(rewards, values, mask, 1.0, 1.0)
    rewards[1, 0], values[1, 1] = 0.0, -torch.inf
    with pytest.raises(ValueError, match=r"^values: row 1 has -inf, which is not finite$"):
        generalized_advantage_estimation(rewards, values, mask, 1.0, 1.0)
    rewards[1], values[1, 1] = 3e38, 0.0
    with pytest.raises(ValueError, match=r"^advantages: row 1 has inf, which is not finite$"):
        generalized_advantage_estimation(rewards, values, mask, 1.0, 1.0)


def test_scores_must_fit_the_rows() -> None:
    for shape in ((3,), (2, 1), ()):
        with pytest.raises(ValueError, match=r"kl \[2, 4\]"):
            token_rewards(torch.zeros(shape), torch.zeros(2, 4), 0.1, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"values \[2, 4\], mask \[2, 5\]"):
        token_rewards(torch.zeros(2), torch.zeros(2, 4), 0.1, torch.ones(2, 5))


def test_advantages_by_hand() -> None:
    # From the back, gamma 0.5 and lam 0.5: deltas 1 - 2 = -1 and 0 + 0.5 * 2 - 4 = -3; A = -1 and -3 + 0.25 * -1.
    rewards, values = torch.tensor([[7.0, 0.0, 1.0, 7.0]]), torch.tensor([[7.0, 4.0, 2.0, 7.0]])
    advantages, returns = generalized_advantage_estimation(rewards, values, torch.tensor([[0, 1, 1, 0]]), 0.5, 0.5)
    assert advantages.tolist() == [[0.0, -3.25, -1.0, 0.0]]
    assert returns.tolist() == [[0.0, 0.75, 1.0, 0.0]]


def test_a_hole_is_stepped_over() -> None:
    # The same trajectory with an inserted token in its middle: neither its value nor a second discount appears.
    rewards, values = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[4.0, 9.0, 2.0]])
    advantages, returns = generalized_advantage_estimation(rewards, values, torch.tensor([[1, 0, 1]]), 0.5, 0.5)
    assert advantages.tolist() == [[-3.25, 0.0, -1.0]]
    assert returns.tolist() == [[0.75, 0.0, 1.0]]


def test_monte_carlo_and_one_step_limits() -> None:
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 0.125]])
    mask = torch.ones(1, 3)
    _, returns = generalized_advantage_estimation(rewards, values, mask, 1.0, 1.0)
    assert returns.tolist() == [[7.0, 6.0, 4.0]]
    advantages, _ = generalized_advantage_estimation(rewards, values, mask, 1.0, 0.0)
    assert advantages.tolist() == [[0.75, 1.875, 3.875]]


@given(masks(), st.integers(0, 99), st.floats(0, 1), st.floats(0, 1))
def test_advantages_equal_the_loop(mask: Tensor, seed: int, gamma: float, lam: float) -> None:
    rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
    advantages, returns = generalized_advantage_estimation(spoil(rewards, mask), spoil(values, mask), mask, gamma, lam)
    expected = loop_over_trajectories(rewards.numpy(), values.numpy(), mask.numpy(), gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), expected[1], rtol=1e-9, atol=1e-12)


def test_results_are_constants_and_inputs_stay_as_they_are() -> None:
    rewards, values, mask = torch.ones(1, 3), torch.ones(1, 3, requires_grad=True), torch.tensor([[0, 1, 1]])
    advantages, returns = generalized_advantage_estimation(rewards, values, mask, 0.9, 0.9)
    assert not advantages.requires_grad and not returns.requires_grad
    scores = torch.ones(1)
    assert not token_rewards(scores, values, 0.1, mask).requires_grad
    assert all(tensor._version == 0 for tensor in (rewards, values, mask, scores))


@pytest.mark.parametrize(("gamma", "lam", "named"), [(1.5, 0.9, "gamma.*1.5"), (0.9, -0.1, "lam.*-0.1")])
def test_factors_outside_their_range_are_refused(gamma: float, lam: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        generalized_advantage_estimation(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), gamma, lam)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"rewards \[1, 2\], values \[1, 3\], mask \[1, 2\]"):
        generalized_advantage_estimation(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2), 1.0, 1.0)
