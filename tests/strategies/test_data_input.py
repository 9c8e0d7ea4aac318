"""A batch on its way from the leader to every rank, over real groups of eight processes.

The layout of the document on `get_data_input`: dp 2, pp 2, tp 2 under `tp-cp-ep-pp-dp`, rank = (dp, pp, tp):

    0 (0,0,0)   1 (0,0,1)   2 (0,1,0)   3 (0,1,1)   4 (1,0,0)   5 (1,0,1)   6 (1,1,0)   7 (1,1,1)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from roll.config import ModelConfig, ParallelSettings, StrategySettings
from roll.parallel.degrees import ParallelDegrees
from roll.parallel.state import ParallelState, parallel_groups
from roll.protocol import ROW_DELIVERIES, DataProto, MicroBatchPlan, MissingRanks, RollCall, delivery
from roll.strategies import MegatronInferStrategy
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


# The document's example: what each rank is, the ranks of its two levels, and what the last stage makes of it.
TABLE = {
    # rank: (dp, pp, tp), tensor x context group of its stage, pipeline group
    0: ((0, 0, 0), [0, 1], [0, 2]),
    1: ((0, 0, 1), [0, 1], [1, 3]),
    2: ((0, 1, 0), [2, 3], [0, 2]),
    3: ((0, 1, 1), [2, 3], [1, 3]),
    4: ((1, 0, 0), [4, 5], [4, 6]),
    5: ((1, 0, 1), [4, 5], [5, 7]),
    6: ((1, 1, 0), [6, 7], [4, 6]),
    7: ((1, 1, 1), [6, 7], [5, 7]),
}
# With cp in place of tp, in the default order: Megatron-Core has no context parallelism in pipelines of neighbours.
TABLE_OF_CP = {
    # rank: (dp, pp, cp), tensor x context group of its stage, pipeline group
    0: ((0, 0, 0), [0, 1], [0, 4]),
    1: ((0, 0, 1), [0, 1], [1, 5]),
    2: ((1, 0, 0), [2, 3], [2, 6]),
    3: ((1, 0, 1), [2, 3], [3, 7]),
    4: ((0, 1, 0), [4, 5], [0, 4]),
    5: ((0, 1, 1), [4, 5], [1, 5]),
    6: ((1, 1, 0), [6, 7], [2, 6]),
    7: ((1, 1, 1), [6, 7], [3, 7]),
}
DOCUMENT_META = {"global_step": 100, "micro_batch_size": 4}
DOCUMENT_MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
NOT_RECEIVED = 255  # no byte of ids below 64 and masks


def document_batch(dp: int, flag: bool | None) -> DataProto:
    """`[16, 2048]` ids and mask of a share, by the document's constructor. With `flag` None the key is absent."""
    ids = torch.randint(0, 64, (16, 2048), generator=torch.Generator().manual_seed(dp))
    return DataProto(
        batch={"input_ids": ids, "attention_mask": torch.ones(16, 2048, dtype=torch.long)},
        non_tensor_batch={"answer": [f"{dp}: {row}" for row in range(16)]},
        meta_info=DOCUMENT_META | ({} if flag is None else {"_broadcast_non_tensor_batch": flag}),
    )


@contextmanager
def levels_noted(noted: list[tuple[list[int], bool, torch.Tensor]]) -> Iterator[None]:
    """Notes of each level of this rank: the group, whether the bytes are there before, and the bytes after."""
    send = delivery.broadcast_bytes

    def noting(runs: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        if not noted and group.rank():
            for run in runs:
                run.fill_(NOT_RECEIVED)
        before = bool((torch.cat(list(runs)) != NOT_RECEIVED).any())
        send(runs, group)
        noted.append((dist.get_process_group_ranks(group), before, torch.cat(list(runs))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "broadcast_bytes", noting)
        yield


def documents_example(folder: Path, layout: dict[str, Any], run_model: bool) -> dict[str, Any]:
    """The document's example on this rank: leaders bring rows, the other six `DataProto()`."""
    settings = StrategySettings(
        name="megatron_infer", model_path=folder, init="random", parallel=ParallelSettings(**layout)
    )
    seen: dict[str, Any] = {}
    with parallel_groups(settings.parallel) as state:
        at, groups = state.at, (state.tp_cp, state.pp)
        seen["place"] = ((at.dp, at.pp, at.cp or at.tp), *map(dist.get_process_group_ranks, groups))
        strategy = MegatronInferStrategy(settings, state)
        for flag in (None, False, True):
            noted: list[tuple[list[int], bool, torch.Tensor]] = []
            whole = document_batch(at.dp, flag)
            with levels_noted(noted):
                received = strategy.get_data_input(whole if state.is_leader else DataProto())
            sent = torch.cat([whole["input_ids"], whole["attention_mask"]]).view(torch.uint8).flatten()
            levels = []
            for group, before, after in noted:
                ids, _ = after[: len(sent)].view(torch.int64).view(2, 16, 2048)
                levels.append((group, before, list(ids.shape), torch.equal(after[: len(sent)], sent)))
            seen[str(flag)] = levels, report(received)
        if run_model:
            strategy.initialize()
            batch = document_batch(at.dp, None) if state.is_leader else DataProto()
            seen["micro-batches"] = []

            def shapes(data: DataProto, output: Any) -> dict[str, torch.Tensor]:
                logits = output.row_logits()
                seen["micro-batches"].append((list(data["input_ids"].shape), list(logits.shape)))
                return {"row": data["input_ids"][:, :1]}

            results = strategy.forward_step(batch, shapes)
            first_ids = document_batch(at.dp, None)["input_ids"][:, :1]
            seen["results"] = None if results is None else torch.equal(results["row"], first_ids)
    return seen


@pytest.mark.parametrize(
    ("layout", "table"), [(DOCUMENT, TABLE), ({"cp": 2, "pp": 2}, TABLE_OF_CP)], ids=["document", "cp for tp"]
)
def test_the_documents_example(
    ranks: RankPool, tmp_path: Path, layout: dict[str, Any], table: dict[int, tuple[Any, list[int], list[int]]]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DOCUMENT_MODEL.to_hf_dict()))
    results = ranks.run(documents_example, tmp_path, layout, "tp" in layout, world_size=8)
    for rank, seen in enumerate(results):
        (dp, pp, part), stage, pipeline = table[rank]
        assert seen["place"] == table[rank]
        has, has_not = ([16, 2048], True), False
        # Level 1 is the first stage's alone; on level 2 its ranks have the rows, later stages get them.
        first = [(stage, part == 0, *has)] if pp == 0 else []
        for flag in (None, False, True):
            levels, received = seen[str(flag)]
            assert levels == [*first, (pipeline, pp == 0 or has_not, *has)], (rank, flag)
            expected = report(document_batch(dp, flag))
            if not flag and (pp, part) != (0, 0):
                expected["objects"] = {}  # The leader keeps its own.
            assert received == expected, (rank, flag)
        if "tp" in layout:
            last = pp == 1
            # 16 rows in micro-batches of 4, vocab 64 / tp 2.
            assert seen["micro-batches"] == ([([4, 2048], [4, 2048, 32])] * 4 if last else [])
            assert seen["results"] is (True if last and part == 0 else None)


FLAG = "_broadcast_non_tensor_batch"


def entries_of_followers(folder: Path) -> list[str]:
    """What is heard of entries of meta_info that only a follower brings, or with another value."""
    settings = StrategySettings(
        name="megatron_infer", model_path=folder, init="random", parallel=ParallelSettings(**DOCUMENT)
    )
    brought: list[tuple[int, dict[str, Any], bool | None]] = [
        (5, {"global_step": 99}, None),
        (3, {FLAG: True}, False),
        (2, {FLAG: True}, None),
    ]
    heard = []
    with parallel_groups(settings.parallel) as state:
        strategy = MegatronInferStrategy(settings, state)
        for rank, meta, flag in brought:
            batch = DataProto(meta_info=meta) if state.rank == rank else DataProto()
            with pytest.raises(ValueError, match="meta_info") as refused:
                strategy.get_data_input(document_batch(state.at.dp, flag) if state.is_leader else batch)
            heard.append(str(refused.value))
        same = DataProto(meta_info={"global_step": 100, FLAG: True})
        received = strategy.get_data_input(document_batch(state.at.dp, True) if state.is_leader else same)
        heard.append(str(received.meta_info == DOCUMENT_META | {FLAG: True} and len(received.non_tensor_batch) == 1))
    return heard


def test_an_entry_of_a_follower_is_the_leaders_or_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DOCUMENT_MODEL.to_hf_dict()))
    for heard in ranks.run(entries_of_followers, tmp_path, world_size=8):
        assert "the batch of rank 5 has another meta_info global_step than the leader's" in heard[0]
        assert f"the batch of rank 3 has another meta_info {FLAG} than the leader's" in heard[1]
        assert f"the batch of rank 2 has meta_info {FLAG}, the leader's has none" in heard[2]
        assert heard[3] == "True"


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
        here = f"arrived/{call._prefix}/{call._call}"
        store.set(f"{here}/{call._rank}", "")
        store.wait([f"{here}/{rank}" for rank in call.ranks if rank not in absent], PATIENCE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RollCall, "arrive", arrive_and_wait)
        yield


def errors_of_bad_batches() -> tuple[dict[str, tuple[bool, str]], bool]:
    """Whether ranks were missing, with what this rank is told, for each bad batch; and whether a good one arrives."""
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
            heard[name] = (isinstance(caught.value, MissingRanks), str(caught.value))
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
            is_missing, message = heard[name]
            assert is_missing == name.startswith("rank")
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
        everywhere = batch_delivery(state, device=CPU, rows=ROW_DELIVERIES["object_store"])
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
