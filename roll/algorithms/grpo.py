"""Group-relative policy optimisation (Shao et al. 2024, "DeepSeekMath", section 4.1): PPO's clipped policy loss, with
the scores of a prompt's other responses in the place of a critic.

"Dr. GRPO" (Liu et al. 2025, "Understanding R1-Zero-Like Training") is `normalize_std: false` with
`loss_agg: seq-mean-token-sum`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, NonNegativeFloat

from roll import algorithms
from roll.algorithms.algorithm import Algorithm, AlgorithmSettings, Credit
from roll.algorithms.loss_term import LossAggregation, LossTerm
from roll.config.loop import LoopSettings
from roll.config.problems import Check, Problem

if TYPE_CHECKING:
    from roll.protocol import DataProto

EPSILON = 1e-6
"""Added to the standard deviation of a group."""


class GRPOSettings(AlgorithmSettings):
    """Clipping, and the KL term in the loss."""

    name: str = "grpo"
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """The policy's probability ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The policy's probability ratio is clipped above at 1 + clip_high."""
    kl_coef: NonNegativeFloat = 0.04
    """Weight of the KL to the reference, estimator k3, in the loss; 0: no such term, and no reference is started."""
    normalize_std: bool = True
    """Whether advantages are divided by the standard deviation of their group's scores."""
    loss_agg: LossAggregation = "seq-mean-token-mean"
    """Aggregation of token losses into the loss of a mini-batch."""

    def checks_in(self, loop: LoopSettings) -> Iterable[Check]:
        def responses_have_a_group() -> Iterator[Problem]:
            if loop.responses_per_prompt < 2:
                each = loop.responses_per_prompt
                yield Problem("responses_per_prompt", f"must be at least 2 for {self.name}, got {each}")

        return (responses_have_a_group,)


class GRPO(Algorithm):
    """A response's advantage is its score, less the mean of its group, over the standard deviation of its group."""

    settings: GRPOSettings
    reads = frozenset({"response_mask", "scores", "group"})
    makes = frozenset({"advantages"})

    @property
    def roles(self) -> Set[str]:
        return {"actor", "reference"} if self.settings.kl_coef else {"actor"}

    def credit(self, batch: DataProto) -> Credit:
        """`advantages`, `[B, S-1]`. Metric: `group_std`, the mean over responses."""
        algorithms.check_finite(scores=batch["scores"])
        mean, std = algorithms.group_moments(batch["scores"], batch["group"])
        advantages = (batch["scores"] - mean) / (std + EPSILON if self.settings.normalize_std else 1)
        mask = batch["response_mask"][:, 1:]
        return Credit({"advantages": advantages.float().unsqueeze(1) * mask}, {"group_std": float(std.mean())})

    def losses(self) -> Mapping[str, list[LossTerm]]:
        settings, per = self.settings, self.settings.loss_agg
        actor = [algorithms.policy_term(settings.clip_low, settings.clip_high, per=per)]
        if settings.kl_coef:
            actor.append(algorithms.kl_term(settings.kl_coef, "k3", per=per))
        return {"actor": actor}


ALGORITHM = GRPO
