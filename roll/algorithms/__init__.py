"""Algorithms of reinforcement learning, one file each, and the pure functions that they share.

Nothing is loaded before it is asked for, and the files of the algorithms load no torch: the settings of a run, which
are theirs, are read in no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.algorithms.aggregate import aggregate_loss, total_loss
    from roll.algorithms.algorithm import Algorithm, AlgorithmSettings, Credit
    from roll.algorithms.gae import generalized_advantage_estimation, token_rewards
    from roll.algorithms.groups import group_moments
    from roll.algorithms.kl import token_kl
    from roll.algorithms.kl_control import (
        AdaptiveKLController,
        FixedKLController,
        KLController,
        KLEstimator,
        KLSettings,
        make_kl_controller,
    )
    from roll.algorithms.loss_term import LossAggregation, LossTerm, Normalizer, TokenLoss
    from roll.algorithms.losses import cross_entropy, entropy_loss, policy_loss, value_loss
    from roll.algorithms.masking import check_finite, masked_mean, masked_sum, whiten
    from roll.algorithms.terms import entropy_term, kl_term, policy_term, value_term

__all__ = [
    "AdaptiveKLController",
    "Algorithm",
    "AlgorithmSettings",
    "Credit",
    "FixedKLController",
    "KLController",
    "KLEstimator",
    "KLSettings",
    "LossAggregation",
    "LossTerm",
    "Normalizer",
    "TokenLoss",
    "aggregate_loss",
    "check_finite",
    "cross_entropy",
    "entropy_loss",
    "entropy_term",
    "generalized_advantage_estimation",
    "group_moments",
    "kl_term",
    "make_kl_controller",
    "masked_mean",
    "masked_sum",
    "policy_loss",
    "policy_term",
    "token_kl",
    "token_rewards",
    "total_loss",
    "value_loss",
    "value_term",
    "whiten",
]

_FILES = {
    "aggregate": ("aggregate_loss", "total_loss"),
    "algorithm": ("Algorithm", "AlgorithmSettings", "Credit"),
    "gae": ("generalized_advantage_estimation", "token_rewards"),
    "groups": ("group_moments",),
    "kl": ("token_kl",),
    "kl_control": (
        "AdaptiveKLController",
        "FixedKLController",
        "KLController",
        "KLEstimator",
        "KLSettings",
        "make_kl_controller",
    ),
    "loss_term": ("LossAggregation", "LossTerm", "Normalizer", "TokenLoss"),
    "losses": ("cross_entropy", "entropy_loss", "policy_loss", "value_loss"),
    "masking": ("check_finite", "masked_mean", "masked_sum", "whiten"),
    "terms": ("entropy_term", "kl_term", "policy_term", "value_term"),
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}

if not TYPE_CHECKING:  # A type checker would take any name for a member of this package.

    def __getattr__(name: str) -> Any:
        if name not in _FILE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
