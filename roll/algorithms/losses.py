"""Per-token losses of PPO and of supervised training. `aggregate_loss` turns them into a scalar.

Every function returns new tensors of shape [B, S-1], zero (with zero gradient) where masked, and treats everything
but the trained model's output as constant. Masked places are selected away before `exp`, so inf or nan there reaches
neither the loss nor the gradient; inf or nan at a kept token does, because it is a fault that must be seen.

Shapes: B rows, S padded length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import check_same_shape, select
from roll.errors import UserError

# exp(20) = 4.9e8. Beyond it the ratio says nothing, and an overflow to inf would make the clipped branch's gradient
# 0 * inf = nan.
MAX_LOG_RATIO = 20.0


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate objective of PPO, to be minimised.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; with a bound for each side as in
    Yu et al. 2025, "DAPO", section "Clip-Higher":

        ratio = exp(log_prob - old_log_prob)
        loss = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))

    The log ratio is bounded to +-20; beyond that the gradient is zero.

    Example: A = 1, ratio = 1.5, clip_high = 0.2: loss -1.2, gradient zero, clipped 1.

    Args:
        log_probs: [B, S-1] of the policy being trained, with gradient.
        old_log_probs: [B, S-1] of the policy that sampled.
        advantages: [B, S-1].
        mask: [B, S-1].
        clip_low: how far the ratio may fall below 1; 0 to 1.
        clip_high: how far the ratio may rise above 1; at least 0.

    Returns:
        The loss, and diagnostics without gradient, zero where masked: `ratio`; `clipped`, 1 where the clipped term
        is the larger and the token hence has no gradient; `approx_kl`, the k1 estimate of KL(old || new).

    Raises:
        ValueError: unequal shapes, or a clip setting outside its range.
    """
    if not 0 <= clip_low <= 1:
        raise UserError(f"clip_low must lie between 0 and 1, got {clip_low}")
    if not clip_high >= 0:
        raise UserError(f"clip_high must be at least 0, got {clip_high}")
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    log_ratio = select(log_probs - old_log_probs.detach(), mask)
    advantages = select(advantages.detach(), mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    diagnostics = {
        "ratio": select(ratio.detach(), mask),
        "clipped": (clipped > unclipped).to(ratio.dtype),
        "approx_kl": -log_ratio.detach(),
    }
    return torch.maximum(unclipped, clipped), diagnostics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, value_clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the critic, with the change since the rollout clipped.

    As in OpenAI baselines, `ppo2/model.py`, the clip that Schulman et al. 2017 use without naming it:

        loss = 0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    Args:
        values: [B, S-1] of the critic being trained, with gradient.
        old_values: [B, S-1] of the critic at the time of the rollout.
        returns: [B, S-1] targets.
        mask: [B, S-1].
        value_clip: in units of the value, above 0; None is the plain squared error.

    Returns:
        The loss, and diagnostics without gradient: `clipped`, 1 where the clipped term is the larger and the token
        hence has no gradient.

    Raises:
        ValueError: unequal shapes, or value_clip not above 0.
    """
    if value_clip is not None and not value_clip > 0:
        raise UserError(f"value_clip must be above 0, or None for no clipping, got {value_clip}")
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values, returns = select(values, mask), select(returns.detach(), mask)
    error = (values - returns).square()
    if value_clip is None:
        return 0.5 * error, {"clipped": torch.zeros_like(error.detach())}
    old_values = select(old_values.detach(), mask)
    clipped_error = (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
    diagnostics = {"clipped": (clipped_error > error).to(error.dtype)}
    return 0.5 * torch.maximum(error, clipped_error), diagnostics


def entropy_loss(entropy: Tensor, mask: Tensor) -> Tensor:
    """The entropy bonus as a loss: `-entropy`, to be weighted with the entropy coefficient and added.

    Args:
        entropy: [B, S-1] of the policy's distribution at each token, in nats, with gradient.
        mask: [B, S-1].
    """
    return -select(entropy, mask)


def cross_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood of each target token, in nats.

    Args:
        log_probs: [B, S-1] of the target tokens, with gradient.
        mask: [B, S-1].
    """
    return -select(log_probs, mask)
