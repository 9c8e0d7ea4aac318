"""The way of the weights: how they leave the role that trains them, travel, and are taken by the engines.

    trained role (WeightSource)          driver                      engines (WeightTarget)
    declare(version)      ── shapes ──▶              ── shapes ──▶   open_update: do they fit?
    next_bucket ┐                                                    each bucket: the next one, whole?
      gather    │ put into the                                         then written over the old weights
      copy      ┘ object store ── ref ▶  one bucket is made   ── ref ▶ take
                                         while one is taken
                                         no more? next stage         close_update: are all tensors there?

At most two buckets exist at a time: the next one is made only when the one before the last has been taken, and nobody
refers to it any more. A Ray of a run's own frees it at once; a cluster may keep it for a second (`FREE_AT_ONCE` in
`roll.workers.connection`). Pipeline stages send one after the other for the same reason.

An update is taken as a whole. What does not fit is refused before anything is written; an update that fails between
two buckets leaves an engine without weights, which refuses to generate (`roll.generation.Generator`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import ray
from torch import Tensor

from roll.generation.generator import Generator
from roll.generation.weights import Bucket, Shapes
from roll.models.family_tensors import family_shapes
from roll.workers.dispatch import Dispatch
from roll.workers.method import register

if TYPE_CHECKING:
    from roll.strategies import MegatronTrainStrategy
    from roll.workers.model_roles import Actor
    from roll.workers.rollout import Rollout


class WeightSource:
    """A worker that sends the weights of its model."""

    strategy: MegatronTrainStrategy
    _outgoing: Iterator[Mapping[str, Tensor]] = iter(())
    _version = 0

    @register(Dispatch.RANK_ZERO)
    def declare(self, version: int, bucket_bytes: int) -> Shapes:
        """Begin to send the weights; name and shape of every tensor of the whole model, as its family has it."""
        self._version, self._outgoing = version, self.strategy.model_update(bucket_bytes)
        return family_shapes(self.strategy.model_config, self.strategy.settings.head)

    @register(Dispatch.STAGE_LEADERS)
    def next_bucket(self, stage: int, index: int) -> ray.ObjectRef | None:
        """The next bucket of a pipeline stage, as a reference into the object store; None after its last.

        Every rank of the stage takes part, since to make a bucket is collective; the ranks of other stages do nothing.

        Args:
            index: the bucket's number in the update.
        """
        at = self.strategy.state.at
        tensors = next(self._outgoing, None) if at.pp == stage else None
        if tensors is None or not at.tp == at.cp == at.dp == 0:
            return None
        return ray.put(Bucket.of(self._version, index, tensors))


class WeightTarget:
    """A worker whose engine takes the weights. Each method raises WrongWeights for what does not fit."""

    engine: Generator

    @register(Dispatch.ONE_TO_ALL)
    def open_update(self, version: int, shapes: Shapes) -> None:
        """Wake the engine, and begin an update."""
        self.engine.wake()
        self.engine.open_update(version, shapes)

    @register(Dispatch.ONE_TO_ALL)
    def take(self, bucket: Bucket) -> None:
        """Write a bucket; the driver gives a reference to it."""
        self.engine.take(bucket)

    @register(Dispatch.ONE_TO_ALL)
    def close_update(self) -> None:
        """End the update: the engine generates with these weights from now on."""
        self.engine.close_update()


class WeightSync:
    """Gives engines the weights of a trained role, each time as a new version: 1, 2, 3 and so on.

    Args:
        bucket_bytes: size of a bucket; a larger tensor has one of its own.
    """

    def __init__(self, source: Actor, target: Rollout, bucket_bytes: int) -> None:
        self.source, self.target, self.bucket_bytes = source, target, bucket_bytes
        self.version = 0

    def sync(self) -> None:
        """Send all weights.

        Raises as the calls of a role do; the cause is a WrongWeights where an engine does not take the update.
        """
        self.version += 1
        self.target.open_update(self.version, self.source.declare(self.version, self.bucket_bytes))
        index, taking = 0, None
        for stage in range(self.source.cluster.degrees.pp):
            while True:
                # While the engines take the one before. They are given the bucket that this reference stands for.
                bucket: Any = self.source.next_bucket(stage, index)[stage]
                if taking is not None:
                    taking.result()
                    taking = None
                if bucket is None:
                    break
                taking = self.target.take.submit(bucket)
                index += 1
        self.target.close_update()
