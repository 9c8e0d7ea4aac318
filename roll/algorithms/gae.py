"""Rewards per token and generalised advantage estimation.

Index t speaks of token t+1: `values[:, t]` is the value of the state before that token, `rewards[:, t]` what emitting
it earned. The tokens of a row that the mask keeps form its trajectory, in order. Masked places before, between (text
that the environment inserted) and after them are stepped over: they earn nothing, have no value, and do not discount.
The state after the last kept token is terminal, also when the response was cut at its maximum length.

Shapes: B rows, S padded length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import check_finite, check_same_shape, select
from roll.errors import UserError


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, kl_coef: float, mask: Tensor) -> Tensor:
    """The score at the last response token, minus `kl_coef * kl` at every response token.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2, spread over tokens.

    Args:
        scores: [B] floating point, one score per response.
        kl: [B, S-1] per-token KL estimate of the policy to the reference.
        kl_coef: weight of the KL penalty; at 0 `kl` is not looked at.
        mask: [B, S-1], response tokens.

    Returns:
        [B, S-1] in kl's dtype, zero where masked. A row without response tokens has no place for its score: all zeros.

    Raises:
        ValueError: shapes that do not fit; or a score, a KL or a reward that is not finite, with its row.
    """
    if scores.shape != kl.shape[:1]:
        raise UserError(f"scores must hold one number per row: scores {list(scores.shape)}, kl {list(kl.shape)}")
    kl, keep = select(kl, mask), mask != 0
    check_finite(keep.any(dim=1), scores=scores)
    if kl_coef == 0:  # 0 * inf is nan.
        penalty = torch.zeros_like(kl)
    else:
        check_finite(kl=kl)
        penalty = kl_coef * kl
    left = keep.flip(1).cumsum(1).flip(1)  # response tokens from here to the end of the row
    is_last = keep & (left == 1)
    rewards = torch.where(is_last, scores.to(penalty.dtype)[:, None] - penalty, -penalty)
    check_finite(rewards=rewards)  # A product or a sum can leave the range of the dtype.
    return rewards


@torch.no_grad()
def generalized_advantage_estimation(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every response token.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16:

        delta_t = r_t + gamma * V(s_t+1) - V(s_t)
        A_t = delta_t + gamma * lam * A_t+1
        R_t = A_t + V(s_t)

    where t+1 is the next kept token of the row, and V and A are 0 after the last.

    Example: rewards [0, 1], values [0.5, 0.25], gamma 1, lam 1: advantages [0.5, 0.75], returns [1, 1].

    Args:
        rewards: [B, S-1] floating point.
        values: [B, S-1] floating point, from the critic that also made the rollout's baseline.
        mask: [B, S-1], response tokens.
        gamma: discount per token, 0 to 1.
        lam: 0 (one-step) to 1 (Monte Carlo).

    Returns:
        advantages and returns, [B, S-1], zero where masked; they carry no gradient.

    Raises:
        ValueError: unequal shapes, gamma or lam outside 0 to 1, or a reward, value or advantage that is not finite,
            with its row.
    """
    check_same_shape(rewards=rewards, values=values, mask=mask)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise UserError(f"{name} must lie between 0 and 1, got {number}")
    check_finite(mask, rewards=rewards, values=values)
    rewards, values, keep = select(rewards, mask), select(values, mask), mask != 0
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        # At a masked place nothing happens: the token before it sees the same future.
        next_value = torch.where(keep[:, t], values[:, t], next_value)
        next_advantage = torch.where(keep[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(keep[:, t], advantage, 0.0)
    returns = advantages + values
    check_finite(advantages=advantages, returns=returns)
    return advantages, returns
