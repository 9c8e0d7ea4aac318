"""A model role on ranks: the strategy receives rows in the way in which the driver sends them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from roll.parallel.degrees import ParallelDegrees
from roll.parallel.state import destroy_parallel
from roll.protocol import ROW_DELIVERIES, DataProto, delivery
from roll.workers.dispatch import Dispatch, Rule
from roll.workers.model_roles import ReferenceWorker
from roll.workers.routing import route
from tests.rank_pool import RankPool
from tests.strategies.tiny import make_batch, settings, write_tiny


def looked_up(folder: Path, name: str) -> tuple[int, DataProto | None]:
    """How often this rank takes part in a broadcast, and its answer to `compute_log_probs`."""
    way, rank = ROW_DELIVERIES[name], torch.distributed.get_rank()
    worker = ReferenceWorker(
        settings=settings(folder, "megatron_infer", tp=2),
        timeout_s=60.0,
        role="reference",
        rank=rank,
        world_size=2,
        delivery=way,
    )
    worker.initialize()
    rule = Rule(Dispatch.DP_MP_DISPATCH_FIRST)
    routed, _ = route(rule, ParallelDegrees(2, tp=2), [make_batch()], {}, delivery=way)
    broadcasts = 0
    send = delivery.broadcast_bytes

    def counted(runs: Sequence[torch.Tensor], group: torch.distributed.ProcessGroup) -> None:
        nonlocal broadcasts
        broadcasts += 1
        send(runs, group)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delivery, "broadcast_bytes", counted)
            patch.setattr(delivery, "FEW_BYTES", 0)
            answer = worker.compute_log_probs(routed[rank].args[0])
        return broadcasts, answer
    finally:
        destroy_parallel()


def test_one_delivery_for_both_sides(ranks: RankPool, tmp_path: Path) -> None:
    write_tiny(tmp_path)
    stored, sent = (ranks.run(looked_up, tmp_path, name) for name in ("object_store", "broadcast"))
    for answers in (stored, sent):
        assert answers[0][1] is not None and answers[1][1] is None
    assert [count for count, _ in stored] == [0, 0] and [count for count, _ in sent] == [1, 1]
    assert torch.equal(stored[0][1]["log_probs"], sent[0][1]["log_probs"])
