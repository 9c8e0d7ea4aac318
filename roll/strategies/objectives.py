"""Losses of PPO's steps: pure functions of settings, micro-batch and output.

`train_step` calls a loss with the last two; bind the settings with `functools.partial`.
"""

from __future__ import annotations

from roll.algorithms.aggregate import aggregate_loss
from roll.algorithms.losses import entropy_loss, policy_loss, value_loss
from roll.config import PPOSettings
from roll.protocol import DataProto
from roll.strategies.output import Loss, ModelOutput


def policy_objective(ppo: PPOSettings, data: DataProto, output: ModelOutput) -> Loss:
    """Clipped policy loss with an entropy bonus.

    Reads `log_probs` (of the policy that sampled) and `advantages`, `[b, S-1]`.
    """
    assert data.normalizers is not None
    response_mask = data["response_mask"]
    mask = response_mask[:, 1:]
    entropy = None
    if ppo.entropy_coef:
        log_probs, entropy = output.log_probs_and_entropy(data["input_ids"], response_mask)
    else:
        log_probs = output.log_probs(data["input_ids"], response_mask)
    per_token, diagnostics = policy_loss(
        log_probs, data["log_probs"], data["advantages"], mask, ppo.clip_low, ppo.clip_high
    )
    means = {"ratio": diagnostics["ratio"], "clip_fraction": diagnostics["clipped"]}
    means["approx_kl"] = diagnostics["approx_kl"]
    if entropy is not None:
        per_token = per_token + ppo.entropy_coef * entropy_loss(entropy, mask)
        means["entropy"] = entropy
    loss = aggregate_loss(per_token, mask, data.normalizers, ppo.loss_agg)
    return loss, {name: aggregate_loss(value.detach(), mask, data.normalizers) for name, value in means.items()}


def value_objective(ppo: PPOSettings, data: DataProto, output: ModelOutput) -> Loss:
    """Clipped value loss. Reads `values` (of the critic at the rollout) and `returns`, `[b, S-1]`."""
    assert data.normalizers is not None
    mask = data["response_mask"][:, 1:]
    values = output.values(data["response_mask"])
    per_token, diagnostics = value_loss(values, data["values"], data["returns"], mask, ppo.value_clip)
    loss = aggregate_loss(per_token, mask, data.normalizers, ppo.loss_agg)
    clipped = aggregate_loss(diagnostics["clipped"], mask, data.normalizers)
    return loss, {"clip_fraction": clipped}
