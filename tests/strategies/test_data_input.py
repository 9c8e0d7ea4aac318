"""A batch on its way from the leader to every rank, over real groups of eight processes.

The layout of the document on `get_data_input`: dp 2, pp 2, tp 2 under `tp-cp-ep-pp-dp`, rank = (dp, pp, tp):

    0 (0,0,0)   1 (0,0,1)   2 (0,1,0)   3 (0,1,1)   4 (1,0,0)   5 (1,0,1)   6 (1,1,0)   7 (1,1,1)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from roll.config import ParallelSettings
from roll.parallel.degrees import ParallelDegrees
from roll.parallel.state import ParallelState
from roll.protocol import DataProto, MicroBatchPlan, MissingRanks, RollCall, delivery
from roll.strategies.data_input import batch_delivery
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=200)
DOCUMENT: dict[str, Any] = {"tp": 2, "pp": 2, "rank_order": "tp-cp-ep-pp-dp"}
LAYOUTS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    # The ranks that get one batch, their leader first.
    "document": (DOCUMENT, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "stages far apart": ({"tp": 2, "pp": 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    "tp 2 cp 2 pp 2": ({"tp": 2, "cp": 2, "pp": 2}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    "cp 2 dp 4": ({"cp": 2}, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "tp 2 cp 2, cp first": ({"tp": 2, "cp": 2, "rank_order": "cp-tp-ep-pp-dp"}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "isp": ({"mode": "isp", "sp": 4, "wp": 2, "pp": 2}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    "dp 8": ({}, [[rank] for rank in range(8)]),
}


@contextmanager
def groups_of(layout: dict[str, Any]) -> Iterator[ParallelState]:
    """Of the layout only the groups that a batch crosses: eight ranks that load Megatron-Core would take a minute.

    That Megatron-Core's own groups are these is what `tests/parallel/test_state.py` compares.
    """
    settings, rank = ParallelSettings(**layout), dist.get_rank()
    degrees = ParallelDegrees.of(settings, dist.get_world_size())
    groups = {axes: dist.new_subgroups_by_enumeration(degrees.groups(axes))[0] for axes in ("tp-cp", "pp")}
    collection: Any = SimpleNamespace(tp_cp=groups["tp-cp"], pp=groups["pp"])
    yield ParallelState(settings.mode, degrees, rank, collection, None)
    for group in groups.values():
        dist.destroy_process_group(group)


def batch_of(leader: int, rows: int = 16) -> DataProto:
    """The document's batch, other values for each leader, with further dtypes and layouts."""
    generator = torch.Generator().manual_seed(leader)
    ids = torch.randint(0, 50_000, (rows, 2048), generator=generator)
    tensors = {
        "input_ids": ids,
        "attention_mask": (ids > 20_000).long(),
        "transposed": torch.randn(3, rows, generator=generator).T,
        "flags": ids[:, ::700] > 30_000,
        "half": torch.randn(rows, 3, generator=generator).to(torch.bfloat16),
        "counts": torch.arange(rows, dtype=torch.int32) + leader,
        "nothing": torch.zeros(rows, 0),
    }
    texts = {"answer": [f"{leader}: {row}" for row in range(rows)]}
    return DataProto.from_dict(tensors, texts, {"global_step": 100, "micro_batch_size": 4})


def report(data: DataProto) -> dict[str, Any]:
    """All that must be equal, values as a digest of their bytes."""
    digests = {
        name: (str(x.dtype), tuple(x.shape), hashlib.sha256(x.contiguous().view(torch.uint8).numpy()).hexdigest())
        for name, x in data.tensors.items()
    }
    objects = {name: values.tolist() for name, values in data.non_tensor_batch.items()}
    return {"tensors": digests, "objects": objects, "meta": data.meta_info}


def deliver_in_all_layouts() -> dict[tuple[str, bool], dict[str, Any]]:
    """What this rank has after the delivery, for each layout and both settings of the flag."""
    reports = {}
    for name, (layout, _) in LAYOUTS.items():
        with groups_of(layout) as state:
            way = batch_delivery(state, device=CPU)
            for flag in (False, True):
                whole = batch_of(state.rank)
                batch = whole if state.is_leader else whole.stub()
                reports[name, flag] = report(way.deliver(batch, non_tensor=flag))
    return reports


def test_every_rank_has_the_batch_of_its_leader(ranks: RankPool) -> None:
    results = ranks.run(deliver_in_all_layouts, world_size=8)
    for name, (_, shares) in LAYOUTS.items():
        for share in shares:
            expected = report(batch_of(share[0]))
            assert expected["tensors"]["input_ids"][1] == (16, 2048)
            for flag in (False, True):
                for rank in share:
                    keeps_objects = flag or rank == share[0]
                    of_rank = expected | {"objects": expected["objects"] if keeps_objects else {}}
                    assert results[rank][name, flag] == of_rank, (name, flag, rank)


def groups_that_bytes_cross() -> list[list[int]]:
    crossed = []
    send = delivery.broadcast_bytes

    def noting(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        crossed.append(dist.get_process_group_ranks(group))
        send(flat, group)

    with groups_of(DOCUMENT) as state, pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "broadcast_bytes", noting)
        batch = batch_of(state.rank)
        batch_delivery(state, device=CPU).deliver(batch if state.is_leader else batch.stub(), non_tensor=True)
    return crossed


def test_first_over_the_stage_then_along_the_pipelines(ranks: RankPool) -> None:
    assert ranks.run(groups_that_bytes_cross, world_size=8) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[0, 2]],
        [[1, 3]],
        [[4, 5], [4, 6]],
        [[4, 5], [5, 7]],
        [[4, 6]],
        [[5, 7]],
    ]


def refuse_number_three(batch: DataProto) -> None:
    if batch.meta_info.get("bad"):
        raise {"value": ValueError, "key": KeyError}[batch.meta_info["bad"]]("row 3")


PLANS = [
    MicroBatchPlan(rows=(rows, tuple(range(16, 32))), shares=(((0, 1, 2, 3), tuple(range(4, 16))),) * 2)
    for rows in (tuple(range(16)), tuple(reversed(range(16))))
]
Brings = Callable[[ParallelState, DataProto], DataProto | None]


def leader_four_is_refused(kind: str) -> Brings:
    def brings(state: ParallelState, batch: DataProto) -> DataProto:
        return DataProto(batch.batch, batch.non_tensor_batch, {"bad": kind} if state.rank >= 4 else {})

    return brings


BAD: dict[str, Brings] = {
    "value": leader_four_is_refused("value"),
    "key": leader_four_is_refused("key"),
    "objects": lambda state, batch: (
        DataProto(batch.batch, {"f": np.array([lambda: 0] * 16)}, batch.meta_info) if state.rank == 0 else batch
    ),
    "stub": lambda state, batch: batch.stub(),
    "shape": lambda state, batch: batch_of(1, rows=8) if state.rank == 1 else batch,
    "more": lambda state, batch: (
        batch.union(DataProto.from_dict({"more": torch.zeros(16)})) if state.rank == 3 else batch
    ),
    "plan": lambda state, batch: batch.with_plan(PLANS[state.rank == 6]),
    "rank 2": lambda state, batch: None if state.rank == 2 else batch,
    "rank 4": lambda state, batch: None if state.rank == 4 else batch,
}
FEWER = "rank 1 with attention_mask int64[8, 2048], counts int32[8], flags bool[8, 3], half bfloat16[8, 3], input_ids "
MESSAGES = {
    "value": ("row 3", "the batch of data-parallel rank 1 was refused: row 3"),
    "key": ("KeyError: 'row 3'", "the batch of data-parallel rank 1 was refused: KeyError: 'row 3'"),
    "objects": ("non_tensor_batch cannot be pickled: ", "the batch of data-parallel rank 0 was refused: non_tensor_"),
    "stub": ("the leader has no rows, only a stub", "the leader has no rows, only a stub"),
    "shape": (FEWER, FEWER),
    "more": ("rank 0 came with less, rank 3 with more float32[16]", "data-parallel rank 0 was refused: "),
    "plan": ("the batch of rank 6 has another micro-batch plan", "data-parallel rank 1 was refused: "),
    "rank 2": ("model-parallel group of dp 0 (ranks 0, 1, 2, 3): rank 2 did not come to call 8 within 2 s",) * 2,
    "rank 4": (
        "model-parallel group of dp 1 (ranks 4, 5, 6, 7): rank 4 did not come to call 9 within 2 s",
        "leaders of the data-parallel shares (ranks 0, 4): rank 4 did not come to call 9 within 4 s",
    ),
}


@contextmanager
def arriving_together(store: Any, absent: list[int]) -> Iterator[None]:
    """A rank that comes to a call waits for the others that come: a slow one is not missing, on a busy machine either.

    Args:
        absent: the ranks that do not come to the calls now; the test changes it.
    """
    arrive = RollCall.arrive

    def arrive_and_wait(call: RollCall, word: bytes) -> None:
        arrive(call, word)
        store.wait([call._word(rank) for rank in call.ranks if rank not in absent], PATIENCE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RollCall, "arrive", arrive_and_wait)
        yield


def errors_of_bad_batches() -> tuple[dict[str, tuple[str, str]], bool]:
    """This rank's error for each bad batch, and whether a good batch still arrives."""
    heard = {}
    absent: list[int] = []
    store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    with groups_of(DOCUMENT) as state, arriving_together(store, absent):
        way = batch_delivery(state, device=CPU, timeout_s=2.0)
        for name, bring in BAD.items():
            batch = bring(state, batch_of(0))
            absent[:] = [int(name.removeprefix("rank "))] if name.startswith("rank ") else []
            dist.barrier()
            if batch is None:  # It comes when all others have given up.
                store.wait([f"{name}/{rank}" for rank in range(8) if rank != state.rank], PATIENCE)
                batch = batch_of(0)
            with pytest.raises((ValueError, MissingRanks)) as caught:
                way.deliver(batch, non_tensor=True, check=refuse_number_three)
            heard[name] = (type(caught.value).__name__, str(caught.value))
            store.set(f"{name}/{state.rank}", "")
        dist.barrier()
        absent.clear()
        good = way.deliver(batch_of(0), non_tensor=True)
    return heard, report(good) == report(batch_of(0))


def test_what_is_wrong_on_one_rank_is_heard_by_all(ranks: RankPool) -> None:
    results = ranks.run(errors_of_bad_batches, world_size=8)
    for rank, (heard, works) in enumerate(results):
        assert works
        for name, messages in MESSAGES.items():
            kind, message = heard[name]
            assert kind == ("MissingRanks" if name.startswith("rank") else "ValueError")
            its_share = 1 if name in ("value", "key", "plan", "rank 4") else 0
            assert messages[rank // 4 != its_share] in message, (name, rank, message)


def chosen_and_shared() -> tuple[list[str], list[str], bool, str, str]:
    with groups_of(DOCUMENT) as state:
        way = batch_delivery(state, device=CPU)
        batch = batch_of(state.rank - state.rank % 4)
        stub = batch if state.is_leader else batch.stub()
        some = way.deliver(stub, non_tensor=False, keys=["half", "counts"])
        with pytest.raises(ValueError, match="the batch lacks ids, reward; it has attention_mask, counts, ") as lacks:
            way.deliver(stub, non_tensor=False, keys=["ids", "counts", "reward"])
        everywhere = batch_delivery(state, device=CPU, rows_on="every_rank")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delivery, "broadcast_bytes", None)  # would fail if it were called
            own = everywhere.deliver(batch, non_tensor=True, keys=["counts"])
            bare = everywhere.deliver(batch, non_tensor=False)
            with pytest.raises(ValueError, match=r"rank 1 has no rows, only a stub") as no_rows:
                everywhere.deliver(batch.stub() if state.rank == 1 else batch, non_tensor=False)
        same = own["counts"].data_ptr() == batch["counts"].data_ptr() and bool(own.non_tensor_batch)
        assert list(bare.non_tensor_batch) == (["answer"] if state.is_leader else [])
        return list(some.tensors), list(own.tensors), same, str(lacks.value), str(no_rows.value)


def test_only_what_is_asked_for_and_nothing_where_every_rank_has_its_rows(ranks: RankPool) -> None:
    for rank, (some, own, same, _, no_rows) in enumerate(ranks.run(chosen_and_shared, world_size=8)):
        assert some == ["half", "counts"] and own == ["counts"] and same
        assert no_rows.startswith("the batch of data-parallel rank 0") == (rank >= 4)
