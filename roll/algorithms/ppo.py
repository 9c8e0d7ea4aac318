"""Proximal policy optimisation (Schulman et al. 2017) with a critic and a KL penalty to a frozen reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from roll import algorithms
from roll.algorithms.algorithm import Algorithm, AlgorithmSettings, Credit
from roll.algorithms.kl_control import AdaptiveKLController, KLController, KLSettings, make_kl_controller
from roll.algorithms.loss_term import LossAggregation, LossTerm
from roll.config.loop import LoopSettings
from roll.config.problems import Check, Problem
from roll.config.roles import TrainRoleSettings

if TYPE_CHECKING:
    from roll.protocol import DataProto

UnitFloat = Annotated[float, Field(ge=0, le=1)]


class PPOSettings(AlgorithmSettings):
    """Advantages, clipping, the KL penalty and the critic."""

    name: str = "ppo"
    critic: TrainRoleSettings
    """The value function."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is trained."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    lam: UnitFloat = 0.95
    """Lambda of generalised advantage estimation."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The policy's probability ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The policy's probability ratio is clipped above at 1 + clip_high."""
    value_clip: PositiveFloat | None = 0.2
    """Distance that a value may move from the one at sampling time before its loss is clipped; null: never clipped."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the policy's loss; 0: the loss computes no entropy."""
    kl: KLSettings
    """The penalty for leaving the reference, subtracted from each token's reward."""
    loss_agg: LossAggregation = "token-mean"
    """Aggregation of token losses into the loss of a mini-batch."""
    whiten_advantages: bool = True
    """Whether advantages are shifted to mean 0 and scaled to variance 1 over the tokens of a step."""
    reward_clip: PositiveFloat | None = None
    """Scores are clipped to plus or minus this; null: never clipped."""

    def checks_in(self, loop: LoopSettings) -> Iterable[Check]:
        def horizon_is_long_enough() -> Iterator[Problem]:
            largest = AdaptiveKLController.MAX_ERROR
            if self.kl.kind == "adaptive" and self.kl.horizon <= largest * loop.rows_per_step:
                least = f"{largest} times {loop.rows_text}"
                text = f"{self.kl.horizon} is not above {least}; the weight could turn negative"
                yield Problem("algorithm.kl.horizon", text)

        return (horizon_is_long_enough,)


class PPO(Algorithm):
    """Rewards per token, generalised advantages, and clipped losses of policy and value function."""

    settings: PPOSettings
    makes = frozenset({"advantages", "returns"})

    @property
    def roles(self) -> Set[str]:
        return {"actor", "critic"} | ({"reference"} if self.settings.kl.penalises else set())

    @property
    def reads(self) -> Set[str]:
        fields = {"response_mask", "scores", "log_probs", "values"}
        return fields | ({"ref_log_probs"} if self.settings.kl.penalises else set())

    @cached_property
    def kl_weight(self) -> KLController:
        """Holds the weight of the penalty."""
        kl = self.settings.kl
        return make_kl_controller(kl.kind, kl.coef, kl.target, kl.horizon)

    def credit(self, batch: DataProto) -> Credit:
        """`advantages` and `returns`, `[B, S-1]`.

        Metrics: `kl` (to the reference, summed over a response, mean over responses; what an adaptive weight steers;
        none without a penalty), `kl_coef`, `value`, `return` (means over tokens).
        """
        settings, kl_coef = self.settings, self.kl_weight.value
        mask, scores, values = batch["response_mask"][:, 1:], batch["scores"], batch["values"]
        algorithms.check_finite(scores=scores)  # Before they are clipped, which would hide an infinity.
        if settings.reward_clip is not None:
            scores = scores.clamp(-settings.reward_clip, settings.reward_clip)
        metrics = {"kl_coef": kl_coef}
        kl = values.new_zeros(values.shape)
        if settings.kl.penalises:
            kl = algorithms.token_kl(batch["log_probs"], batch["ref_log_probs"], mask, settings.kl.estimator)
            metrics["kl"] = float(algorithms.masked_sum(kl, mask) / len(batch))
        rewards = algorithms.token_rewards(scores, kl, kl_coef, mask)
        advantages, returns = algorithms.generalized_advantage_estimation(
            rewards, values, mask, settings.gamma, settings.lam
        )
        if settings.whiten_advantages:
            advantages = algorithms.whiten(advantages, mask)
        for name, of_tokens in (("value", values), ("return", returns)):
            metrics[name] = float(algorithms.masked_mean(of_tokens, mask))
        return Credit({"advantages": advantages, "returns": returns}, metrics)

    def losses(self) -> Mapping[str, list[LossTerm]]:
        settings, per = self.settings, self.settings.loss_agg
        actor = [algorithms.policy_term(settings.clip_low, settings.clip_high, per=per)]
        if settings.entropy_coef:
            actor.insert(0, algorithms.entropy_term(settings.entropy_coef, per=per))
        return {"critic": [algorithms.value_term(settings.value_clip, per=per)], "actor": actor}

    def trains(self, role: str, step: int) -> bool:
        return role == "critic" or step > self.settings.critic_warmup_steps

    def observe(self, metrics: Mapping[str, float], responses: int) -> None:
        if "kl" in metrics:
            self.kl_weight.update(metrics["kl"], responses)


ALGORITHM = PPO
