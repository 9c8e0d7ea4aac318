"""What goes wrong on one rank of a delivery is heard by all: ranks as threads that share a store, no bytes are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from roll.protocol import (
    ROW_DELIVERIES,
    BatchDelivery,
    DataProto,
    LossNormalizers,
    MicroBatchPlan,
    MissingRanks,
    RollCall,
    delivery,
)
from roll.protocol.roll_call import KEYS_KEPT
from tests.protocol.virtual_time import Clock, VirtualStore

CPU = torch.device("cpu")


def batch_of(rows: int = 2, **meta: Any) -> DataProto:
    return DataProto.from_dict({"ids": torch.ones(rows, 3)}, {"text": ["a"] * rows}, meta)


def deliver_on_four(
    brings: Callable[[int], Any],
    *,
    timeout_s: float = 20.0,
    late: dict[int, float] | None = None,
    rows: str = "object_store",
    calls: int = 1,
    held: dict[str, bytes] | None = None,
) -> list[Any]:
    """What each of four ranks gets, or raises: ranks 0 1 and 2 3 share a batch, 0 and 2 lead; all have rows.

    Args:
        late: for how long a rank lets the others wait.
        calls: number of deliveries, of which the last one counts.
        held: what is in the store, for the caller to see.
    """
    clock = Clock()
    store: Any = VirtualStore(clock, held)

    def rank_of(rank: int) -> Any:
        leader = rank - rank % 2
        share = RollCall(store.clone(), [leader, leader + 1], rank, f"dp {leader // 2}", timeout_s)
        leaders = RollCall(store.clone(), [0, 2], rank, "leaders", 2 * timeout_s) if rank == leader else None
        way = BatchDelivery(share, [], leaders=leaders, device=CPU, rows=ROW_DELIVERIES[rows])
        for _ in range(calls - 1):
            way.deliver(brings(rank))
        batch = brings(rank)
        clock.sleep((late or {}).get(rank, 0.0))
        try:
            return way.deliver(batch)
        except (ValueError, MissingRanks) as error:
            return error

    return list(clock.run({rank: partial(rank_of, rank) for rank in range(4)}).values())


def test_a_leader_who_comes_when_its_share_has_given_up_is_refused_to_all() -> None:
    # Rank 3 gives up after 40 s; rank 2 comes before the other leader gives up after 80 s.
    for heard in deliver_on_four(lambda rank: batch_of(), timeout_s=40, late={2: 60}):
        assert isinstance(heard, MissingRanks) and heard.ranks == (2,), heard


def by_hand(change: Callable[[DataProto], None]) -> Callable[[], DataProto]:
    def made() -> DataProto:
        batch = batch_of()
        change(batch)
        return batch

    return made


BROUGHT: dict[str, tuple[Callable[[], Any], str]] = {
    "objects of other rows": (
        by_hand(lambda b: b.non_tensor_batch.update(text=np.array(["a"] * 5, dtype=object))),  # type: ignore[attr-defined]
        "fields must have the same number of rows",
    ),
    "unpicklable meta": (by_hand(lambda b: b.meta_info.update(lock=threading.Lock())), "meta_info lock cannot be pick"),
    "nested": (
        by_hand(lambda b: b.batch.set("n", TensorDict({"y": torch.ones(2)}, [2]))),  # type: ignore[union-attr]
        "n must be a tensor",
    ),
    "flag": (by_hand(lambda b: b.meta_info.update(_broadcast_non_tensor_batch=1)), "must be True or False, got 1"),
    "none": (lambda: None, "a DataProto is delivered, got NoneType"),
    "dict": (lambda: {"ids": torch.ones(2, 3)}, "a DataProto is delivered, got dict"),
    "other objects": (lambda: batch_of().rename("text", "words"), "came with"),
}


@pytest.mark.parametrize("name", BROUGHT)
@pytest.mark.parametrize("bad", [0, 3])
def test_what_one_rank_brings_is_refused_to_all(name: str, bad: int) -> None:
    bring, message = BROUGHT[name]
    for heard in deliver_on_four(lambda rank: bring() if rank == bad else batch_of()):
        assert isinstance(heard, ValueError) and message in str(heard), heard


PLANS = [MicroBatchPlan(rows=(rows, (2, 3)), shares=(((0, 1),), ((0, 1),))) for rows in ((0, 1), (1, 0))]
ENTRIES: dict[str, tuple[Callable[[int], DataProto], str]] = {
    # Of each entry two values, and its name in messages.
    "meta": (lambda value: batch_of(step=value), "meta_info step"),
    "flag": (lambda value: batch_of(_broadcast_non_tensor_batch=value == 1), "meta_info _broadcast_non_tensor_batch"),
    "normalizers": (lambda value: batch_of().with_normalizers(LossNormalizers(5, value)), "normalizers"),
    "plan": (lambda value: batch_of().with_plan(PLANS[value - 1]), "micro-batch plan"),
}


def entries_of(batch: DataProto) -> tuple[Any, ...]:
    return batch.meta_info, batch.plan, batch.normalizers


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_the_leaders_or_is_refused_by_name(name: str) -> None:
    bring, called = ENTRIES[name]
    for heard in deliver_on_four(lambda rank: bring(1 if rank == 3 else 2)):
        assert isinstance(heard, ValueError)
        assert f"the batch of rank 3 has another {called} than the leader's" in str(heard)
    for heard in deliver_on_four(lambda rank: bring(1) if rank == 3 else batch_of()):
        assert isinstance(heard, ValueError) and f"the batch of rank 3 has {called}, the leader's has none" in str(
            heard
        )
    # Ranks 1 and 3 come without, and are given their own leader's; which is no business of the other share's.
    for rank, heard in enumerate(deliver_on_four(lambda rank: batch_of() if rank % 2 else bring(1 + rank // 2))):
        assert entries_of(heard) == entries_of(bring(1 + rank // 2)), heard


class OnlyHere:
    """A value that can be pickled and not unpickled, as one of a class that other ranks cannot import."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OnlyHere:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_meta_information_that_a_rank_cannot_unpickle_is_heard_by_all() -> None:
    # Rank 2 leads the share where nothing is wrong.
    for heard in deliver_on_four(lambda rank: batch_of(**({"made": OnlyHere()} if rank == 0 else {}))):
        assert isinstance(heard, ValueError)
        assert "rank 1: meta_info, the plan or the normalizers cannot be unpickled: invalid literal for int()" in str(
            heard
        )


def test_the_leaders_metrics_are_not_given_to_others() -> None:
    for rank, heard in enumerate(deliver_on_four(lambda rank: batch_of(**({} if rank % 2 else {"metrics": {"a": 1}})))):
        assert ("metrics" in heard.meta_info) == (rank % 2 == 0)


def test_memory_that_a_leader_lacks_is_heard_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_runs(tensors: Any, specs: Any) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(delivery, "as_runs", as_runs)
    for heard in deliver_on_four(lambda rank: batch_of(), rows="broadcast"):
        assert isinstance(heard, ValueError) and "OutOfMemoryError: no memory" in str(heard)


def test_equal_meta_information_is_not_refused_and_metrics_are_each_ranks_own() -> None:
    def brings(rank: int) -> DataProto:
        order = [("a", {1, "x"}), ("b", {"k": torch.ones(2), "n": float("nan")})]
        return batch_of(**dict(order if rank % 2 else order[::-1]), metrics={"loss": rank})

    for rank, heard in enumerate(deliver_on_four(brings)):
        assert heard.meta_info["metrics"] == {"loss": [rank]}


def test_deliveries_leave_little_in_the_store() -> None:
    few: dict[str, bytes] = {}
    many: dict[str, bytes] = {}
    deliver_on_four(lambda rank: batch_of(), calls=8, held=few)
    deliver_on_four(lambda rank: batch_of(), calls=40, held=many)
    # Of each rank at most KEYS_KEPT unused keys: the number does not grow with the calls.
    assert len(many) <= len(few) + 6 * KEYS_KEPT, sorted(many)
