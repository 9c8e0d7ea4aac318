"""From scored responses to what PPO learns from: rewards per token, advantages and returns."""

from __future__ import annotations

import torch

from roll.algorithms import (
    check_finite,
    generalized_advantage_estimation,
    masked_mean,
    masked_sum,
    token_kl,
    token_rewards,
    whiten,
)
from roll.config import PPOSettings
from roll.protocol import DataProto

StepMetrics = dict[str, float]


def add_advantages(batch: DataProto, ppo: PPOSettings, kl_coef: float) -> tuple[DataProto, StepMetrics]:
    """The batch with `advantages` and `returns`, `[B, S-1]`, and what is worth knowing about the step.

    Reads `response_mask`, `scores`, `log_probs`, `values`, `entropy`; and `ref_log_probs`, if `kl_coef` is not 0.

    Returns:
        The batch and: `reward` (mean score), `exact_match` (of the sampled responses), `kl` (to the reference, summed
        over a response, mean over responses; what an adaptive controller steers), `kl_coef`, `response_length`,
        `entropy`, `value`, `return` (means over tokens). Without a penalty (`kl_coef` 0) there is no `kl`.

    Raises:
        ValueError: a score, log-prob, value or advantage is not finite; with its row.
    """
    mask = batch["response_mask"][:, 1:]
    scores = batch["scores"]
    check_finite(scores=scores)  # Before they are clipped, which would hide an infinity.
    if ppo.reward_clip is not None:
        scores = scores.clamp(-ppo.reward_clip, ppo.reward_clip)
    if kl_coef:
        kl = token_kl(batch["log_probs"], batch["ref_log_probs"], mask, ppo.kl.estimator)
        kl_metrics = {"kl": masked_sum(kl, mask) / len(batch)}
    else:
        kl, kl_metrics = torch.zeros_like(batch["log_probs"]), {}
    rewards = token_rewards(scores, kl, kl_coef, mask)
    advantages, returns = generalized_advantage_estimation(rewards, batch["values"], mask, ppo.gamma, ppo.lam)
    if ppo.whiten_advantages:
        advantages = whiten(advantages, mask)
    metrics = {
        "reward": batch["scores"].mean(),
        "exact_match": batch["exact"].mean(),
        **kl_metrics,
        "response_length": mask.sum() / len(batch),
        "entropy": masked_mean(batch["entropy"], mask),
        "value": masked_mean(batch["values"], mask),
        "return": masked_mean(returns, mask),
    }
    learned = DataProto.from_dict({"advantages": advantages, "returns": returns})
    return batch.union(learned), {name: float(value) for name, value in metrics.items()} | {"kl_coef": kl_coef}
