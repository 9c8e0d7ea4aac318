"""The way of the weights over real Ray actors: what arrives, how much of it exists at a time, what a failure leaves."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import node_stats
from torch import Tensor

from roll.generation.generator import ServedModel
from roll.generation.records import Sampling
from roll.generation.weights import Bucket
from roll.models.family_tensors import family_shapes
from roll.parallel import ParallelDegrees
from roll.workers import Dispatch, Placement, PlacementLayout, Role, Worker, WorkerFailed, register
from roll.workers.rollout import RolloutWorker
from roll.workers.weight_sync import WeightSource, WeightSync
from tests.outside.table import Table, TableSettings
from tests.strategies.tiny import TINY, write_tiny

LARGEST = 4 * 48 * 96  # Bytes of the largest tensor, wqkv.
BREAKS_OFF = 3
"""The update in which a stage of the trained role fails."""


def live_buckets() -> int:
    return sum(isinstance(found, Bucket) for found in gc.get_objects())


def stored_objects() -> int:
    """Objects that lie in this node's object store."""
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(stats.store_stats.num_local_objects)


def tensors_of(version: int) -> dict[str, Tensor]:
    """Every tensor of the tiny model, each with a value of its own."""
    shapes = family_shapes(TINY, "lm")
    return {name: torch.full(shape, float(version + place)) for place, (name, shape) in enumerate(shapes.items())}


class CountingSource(WeightSource, Worker):
    """Pipeline stages, each with its part of the tensors. Counts before each bucket is made."""

    def __init__(self, **rank: Any) -> None:
        super().__init__(**rank)
        self.counts, self.updates = [0], 0
        self.strategy: Any = SimpleNamespace(
            model_config=TINY,
            settings=SimpleNamespace(head="lm"),
            state=SimpleNamespace(at=SimpleNamespace(pp=self.rank, tp=0, cp=0, dp=0)),
            model_update=self.model_update,
        )

    def model_update(self, bucket_bytes: int) -> Iterator[Mapping[str, Tensor]]:
        self.updates += 1
        own = list(tensors_of(100 * self.updates).items())[self.rank :: self.world_size]
        assert all(tensor.nbytes <= bucket_bytes for _, tensor in own)
        for place, (name, tensor) in enumerate(own):
            if (self.updates, place) == (BREAKS_OFF, 3):
                raise ConnectionError("a rank of the trainer is away")
            self.counts.append(live_buckets())
            yield {name: tensor}

    @register(Dispatch.ONE_TO_ALL)
    def most(self) -> int:
        return max(self.counts)


class Source(Role, CountingSource):
    """All stages."""


class CountingEngine(Table):
    """Counts whenever a bucket is written: those in this process, and those in the object store."""

    def start(self) -> None:
        super().start()
        self.idle, self.here, self.stored = stored_objects(), [0], [0]

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        super().write(tensors)
        self.here.append(live_buckets())
        self.stored.append(stored_objects() - self.idle)


class TargetWorker(RolloutWorker):
    engine: CountingEngine

    @register(Dispatch.ONE_TO_ALL)
    def found(self) -> tuple[int | None, dict[str, Tensor], int, int]:
        engine = self.engine
        return engine.version, engine.tensors, max(engine.here), max(engine.stored)


class Target(Role, TargetWorker):
    """All engines."""


@pytest.fixture
def roles(local_ray: None, tmp_path: Path) -> Iterator[tuple[Any, Target]]:
    """Two pipeline stages and an engine."""
    engine = {
        "settings": TableSettings(name=f"{__name__}:CountingEngine", answers=[[2]]),
        "model": ServedModel(write_tiny(tmp_path), None, "float32", 10, 0, TINY.vocab_size),
        "sampling": Sampling(4, 1.0, (2,)),
    }
    with Placement(PlacementLayout({"source": 2, "rollout": 1})) as placement:
        sends = Source(role="source", degrees=ParallelDegrees(2, pp=2), placement=placement)
        takes = Target(role="rollout", degrees=ParallelDegrees(1), placement=placement, worker_kwargs=engine)
        takes.initialize()
        yield sends, takes


def test_all_weights_arrive_in_buckets_of_which_two_exist_at_most(roles: tuple[Any, Target]) -> None:
    source, target = roles
    weights = WeightSync(source, target, bucket_bytes=LARGEST)
    for version in range(1, BREAKS_OFF):
        weights.sync()
        ((arrived, tensors, here, stored),) = target.found()
        assert arrived == version
        expected = tensors_of(100 * version)
        assert tensors.keys() == expected.keys() and len(expected) > 20
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        assert here == 1
        assert 1 <= stored <= 2, "one is taken while the next is made"
    assert max(source.most()) <= 1
    with pytest.raises(WorkerFailed, match="a rank of the trainer is away"):
        weights.sync()
    ((version, *_),) = target.found()
    assert version is None, "an engine with a part of an update has no weights"
