"""The role that generates responses."""

from __future__ import annotations

from typing import Any

from roll.config import EngineSettings
from roll.generation.batches import pack_responses, unpack_requests
from roll.generation.generator import ServedModel
from roll.generation.records import Sampling
from roll.generation.registry import find_engine
from roll.protocol import DataProto
from roll.workers.dispatch import Dispatch
from roll.workers.method import register
from roll.workers.role import Role
from roll.workers.weight_sync import WeightTarget
from roll.workers.worker import Worker


class RolloutWorker(WeightTarget, Worker):
    """Holds an engine, which holds a whole copy of the actor's weights.

    Args:
        sampling: of every response, unless it is generated greedily; with the length of the longest response.
    """

    def __init__(self, *, settings: EngineSettings, model: ServedModel, sampling: Sampling, **rank: Any) -> None:
        super().__init__(**rank)
        self.engine = find_engine(settings.name)(settings, model)
        self.sampling = sampling

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        """Start the engine. It has no weights before the first update."""
        self.engine.start()

    @register(Dispatch.DP_MP_COMPUTE, uneven="pad", returns_batch=True)
    def generate(self, requests: DataProto, *, seed: int, greedy: bool = False) -> DataProto:
        """One response for each row, at the temperature of sampling or greedily; `seed` decides what is drawn.

        See `roll.generation.batches` for what goes in and comes out.
        """
        sampling = Sampling(
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=None if greedy else self.sampling.temperature,
            end_token_ids=self.sampling.end_token_ids,
        )
        rows = unpack_requests(requests, sampling, seed * self.world_size + self.rank)
        return pack_responses(self.engine.generate(rows), self.sampling.max_new_tokens)

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Free the memory of the engine; the next update wakes it."""
        self.engine.sleep()


class Rollout(Role, RolloutWorker):
    """All ranks that generate."""
