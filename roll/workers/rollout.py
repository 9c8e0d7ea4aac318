"""The role that generates responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from roll.config import RolloutSettings, StrategySettings
from roll.platform import get_platform
from roll.protocol import DataProto
from roll.strategies import HfStrategy
from roll.workers.dispatch import Dispatch
from roll.workers.method import register
from roll.workers.role import Role
from roll.workers.worker import Worker


class RolloutWorker(Worker):
    """Holds a whole copy of the actor's weights and generates with transformers."""

    def __init__(
        self,
        *,
        settings: StrategySettings,
        rollout: RolloutSettings,
        end_token_ids: Sequence[int],
        pad_token_id: int,
        **rank: Any,
    ) -> None:
        super().__init__(**rank)
        self.strategy = HfStrategy(settings)
        self.rollout = rollout
        self.end_token_ids = end_token_ids
        self.pad_token_id = pad_token_id

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        """Load the model."""
        self.strategy.initialize()

    @register(Dispatch.ONE_TO_ALL)
    def update_weights(self, stages: list[list[ray.ObjectRef]]) -> None:
        """Take over the weights that `TrainWorker.weights` placed in the object store."""
        for buckets in stages:
            for bucket in buckets:
                self.strategy.update_weights(ray.get(bucket))

    @register(Dispatch.DP_MP_COMPUTE, uneven="pad", returns_batch=True)
    def generate(self, prompts: DataProto, *, seed: int, greedy: bool = False) -> DataProto:
        """One response per prompt, at the rollout temperature or greedily; `seed` decides what is drawn.

        See `as_responses` for what comes back.
        """
        get_platform().manual_seed(seed * self.world_size + self.rank)
        parts = [
            self.strategy.generate(
                part,
                max_new_tokens=self.rollout.max_new_tokens,
                temperature=None if greedy else self.strategy.settings.temperature,
                end_token_ids=self.end_token_ids,
                pad_token_id=self.pad_token_id,
            )
            for part in prompts.split(self.rollout.batch_size or max(1, len(prompts)))
        ]
        return DataProto.concat(parts).to("cpu")


class Rollout(Role, RolloutWorker):
    """All ranks that generate."""
