"""Settings of PPO itself: sizes of a step, clipping, advantages, the KL penalty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from roll.config.problems import Check, Problem
from roll.config.settings import Settings

UnitFloat = Annotated[float, Field(ge=0, le=1)]


class KLSettings(Settings):
    """The penalty for leaving the reference, subtracted from each token's reward."""

    kind: Literal["fixed", "adaptive"] = "fixed"
    """Whether the weight stays `coef`, or follows the measured KL towards `target`."""
    coef: NonNegativeFloat
    """Weight of the penalty (of the first step, if adaptive). 0: no penalty, no reference, and no `kl` is measured."""
    target: PositiveFloat | None = None
    """KL that an adaptive weight steers to; a fixed one ignores it."""
    horizon: PositiveFloat = 10000
    """Responses over which an adaptive weight changes by its relative error; a fixed one ignores it."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of KL from the log-probabilities of the sampled tokens."""

    @property
    def penalises(self) -> bool:
        """Whether there is a penalty, and so a reference."""
        return self.coef > 0

    def checks(self) -> Iterable[Check]:
        return (self._adaptive_has_a_target, self._adaptive_can_grow)

    def _adaptive_has_a_target(self) -> Iterator[Problem]:
        if self.kind == "adaptive" and self.target is None:
            yield Problem("target", "kind 'adaptive' needs it, got null")

    def _adaptive_can_grow(self) -> Iterator[Problem]:
        if self.kind == "adaptive" and self.coef == 0:
            yield Problem("coef", f"kind 'adaptive' scales it, so it must be above 0, got {self.coef}")


class PPOSettings(Settings):
    """One PPO step: sample a batch of responses, score them, make several passes of updates over them."""

    steps: PositiveInt
    """Steps of the run: batches that are sampled and learned from."""
    prompts_per_step: PositiveInt
    """Prompts of one step."""
    responses_per_prompt: PositiveInt = 1
    """Responses sampled for each prompt; a step has prompts_per_step * responses_per_prompt rows."""
    mini_batch_size: PositiveInt
    """Rows of one optimizer step, over all data-parallel ranks."""
    epochs: PositiveInt = 1
    """Passes over the rows of a step."""
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
    """The penalty for leaving the reference."""
    loss_agg: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """Aggregation of token losses into the loss of a mini-batch."""
    whiten_advantages: bool = True
    """Whether advantages are shifted to mean 0 and scaled to variance 1 over the tokens of a step."""
    reward_clip: PositiveFloat | None = None
    """Scores are clipped to plus or minus this; null: never clipped."""
    critic_warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is trained."""
    eval_every: PositiveInt = 10
    """Steps between evaluations on held-out prompts; the start and the end are always evaluated."""
    sample_every: PositiveInt = 1
    """Steps between those whose completions are written down."""
    samples_per_step: NonNegativeInt = 4
    """Completions written down in such a step."""

    @property
    def rows_per_step(self) -> int:
        """Responses of one step."""
        return self.prompts_per_step * self.responses_per_prompt
