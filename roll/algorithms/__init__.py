"""Advantages, losses, KL and aggregation: pure functions on tensors, without process groups."""

from roll.algorithms.aggregate import LossAggregation, aggregate_loss
from roll.algorithms.gae import generalized_advantage_estimation, token_rewards
from roll.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    KLEstimator,
    make_kl_controller,
    token_kl,
)
from roll.algorithms.losses import cross_entropy, entropy_loss, policy_loss, value_loss
from roll.algorithms.masking import check_finite, masked_mean, masked_sum, whiten

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "KLController",
    "KLEstimator",
    "LossAggregation",
    "aggregate_loss",
    "check_finite",
    "cross_entropy",
    "entropy_loss",
    "generalized_advantage_estimation",
    "make_kl_controller",
    "masked_mean",
    "masked_sum",
    "policy_loss",
    "token_kl",
    "token_rewards",
    "value_loss",
    "whiten",
]
