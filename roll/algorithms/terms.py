"""Terms of losses that algorithms share, each with the fields that it reads.

Log-probs and entropies are those at the rollout temperature. Shapes: b rows of a micro-batch, S padded length.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roll.algorithms.kl import token_kl
from roll.algorithms.kl_control import KLEstimator
from roll.algorithms.loss_term import LossTerm, Normalizer, TokenLoss
from roll.algorithms.losses import entropy_loss, policy_loss, value_loss

if TYPE_CHECKING:
    from roll.protocol import DataProto
    from roll.strategies.output import ModelOutput


def policy_term(clip_low: float, clip_high: float, *, per: Normalizer) -> LossTerm:
    """The clipped surrogate of `policy_loss`. Reads `log_probs`, of the policy that sampled, and `advantages`.

    Metrics: `ratio`, `clip_fraction`, `approx_kl`.
    """
    function = partial(_policy, clip_low, clip_high)
    return LossTerm(function=function, reads=frozenset({"log_probs", "advantages"}), per=per)


def _policy(clip_low: float, clip_high: float, data: DataProto, output: ModelOutput) -> TokenLoss:
    mask = data["response_mask"]
    log_probs = output.log_probs(data["input_ids"], mask)
    loss, diagnostics = policy_loss(log_probs, data["log_probs"], data["advantages"], mask[:, 1:], clip_low, clip_high)
    return loss, {
        "ratio": diagnostics["ratio"],
        "clip_fraction": diagnostics["clipped"],
        "approx_kl": diagnostics["approx_kl"],
    }


def entropy_term(coef: float, *, per: Normalizer) -> LossTerm:
    """The entropy bonus, `coef` times `entropy_loss`. Metric: `entropy`.

    Stands before a term of log-probs: it asks for both in one pass over the vocabulary.
    """
    return LossTerm(function=_entropy, per=per, weight=coef)


def _entropy(data: DataProto, output: ModelOutput) -> TokenLoss:
    mask = data["response_mask"]
    _, entropy = output.log_probs_and_entropy(data["input_ids"], mask)
    return entropy_loss(entropy, mask[:, 1:]), {"entropy": entropy}


def kl_term(coef: float, estimator: KLEstimator, *, per: Normalizer) -> LossTerm:
    """`coef` times the KL to the reference, `token_kl`, with its gradient. Reads `ref_log_probs`. Metric: `kl`."""
    return LossTerm(function=partial(_kl, estimator), reads=frozenset({"ref_log_probs"}), per=per, weight=coef)


def _kl(estimator: KLEstimator, data: DataProto, output: ModelOutput) -> TokenLoss:
    mask = data["response_mask"]
    log_probs = output.log_probs(data["input_ids"], mask)
    kl = token_kl(log_probs, data["ref_log_probs"], mask[:, 1:], estimator)
    return kl, {"kl": kl}


def value_term(value_clip: float | None, *, per: Normalizer) -> LossTerm:
    """`value_loss`. Reads `values`, of the critic at the rollout, and `returns`. Metric: `clip_fraction`."""
    return LossTerm(function=partial(_value, value_clip), reads=frozenset({"values", "returns"}), per=per)


def _value(value_clip: float | None, data: DataProto, output: ModelOutput) -> TokenLoss:
    mask = data["response_mask"]
    values = output.values(mask)
    loss, diagnostics = value_loss(values, data["values"], data["returns"], mask[:, 1:], value_clip)
    return loss, {"clip_fraction": diagnostics["clipped"]}
