"""KL divergence of the policy to the reference: estimators per token.

Shapes: B rows, S padded length.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from roll.algorithms.kl_control import KLEstimator
from roll.algorithms.masking import check_finite, check_same_shape, select
from roll.errors import UserError

# Bounds of `k3`, those of verl (verl/trainer/ppo/core_algos.py, `kl_penalty_forward`); Schulman's note has none.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def token_kl(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled.

    John Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html), with r = reference / policy:

    - `k1`: -log r. Unbiased; its sign varies from token to token.
    - `k2`: (log r)^2 / 2. Biased, low variance.
    - `k3`: (r - 1) - log r. Unbiased and never negative. It grows as r does, so log r is clamped to +-20 and the
      estimate to 10: one token of log r = 100 would outweigh a batch, or overflow. A clamped token has no gradient.
    - `abs`: |log r|. Not an estimate of the KL, but a distance that never rewards.

    Args:
        log_probs: [B, S-1] of the policy.
        ref_log_probs: [B, S-1] of the reference.
        mask: [B, S-1].

    Returns:
        [B, S-1], zero (with zero gradient) where masked.

    Raises:
        ValueError: unknown estimator, unequal shapes, or a kept log-prob that is not finite, with its row.
    """
    if estimator not in get_args(KLEstimator):
        raise UserError(f"kl.estimator must be one of {', '.join(get_args(KLEstimator))}, got {estimator!r}")
    check_same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask)
    check_finite(mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    # Selected before exp: the gradient of exp at a masked inf would be 0 * inf. The estimators map 0 to 0.
    log_ratio = select(ref_log_probs - log_probs, mask)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1: r - 1 of a nearly equal reference would be all rounding.
        return (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_K3)
    return log_ratio.abs()
