"""An algorithm as a user would bring one: REINFORCE with a moving average of the scores as its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import PositiveFloat

from roll.algorithms import Algorithm, AlgorithmSettings, Credit, LossTerm

if TYPE_CHECKING:
    from torch import Tensor

    from roll.protocol import DataProto
    from roll.strategies import ModelOutput


class ReinforceSettings(AlgorithmSettings):
    """The baseline."""

    decay: PositiveFloat = 0.9
    """Weight of the earlier steps in the baseline."""
    longest: PositiveFloat
    """Tokens that a loss is divided by."""


class Reinforce(Algorithm):
    """Williams 1992; no critic, no reference, and nothing is asked of the policy that sampled."""

    settings: ReinforceSettings
    reads = frozenset({"scores", "response_mask"})
    makes = frozenset({"advantages"})
    baseline = 0.0

    def credit(self, batch: DataProto) -> Credit:
        advantages = (batch["scores"] - self.baseline).unsqueeze(1) * batch["response_mask"][:, 1:]
        return Credit({"advantages": advantages}, {"baseline": self.baseline, "score": float(batch["scores"].mean())})

    def observe(self, metrics: Mapping[str, float], responses: int) -> None:
        decay = self.settings.decay
        self.baseline = decay * self.baseline + (1 - decay) * metrics["score"]

    def losses(self) -> dict[str, list[LossTerm]]:
        term = LossTerm(function=policy_gradient, reads=frozenset({"advantages"}), per=self.settings.longest)
        return {"actor": [term]}


def policy_gradient(data: DataProto, output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
    """-A * log p of each token."""
    log_probs = output.log_probs(data["input_ids"], data["response_mask"])
    return -data["advantages"] * log_probs, {"nll": -log_probs}
