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
from torch.distributed import HashStore

from roll.protocol import BatchDelivery, DataProto, LossNormalizers, MissingRanks, RollCall
from tests.protocol.virtual_time import Clock, VirtualStore

CPU = torch.device("cpu")


def batch_of(rows: int = 2, **meta: Any) -> DataProto:
    return DataProto.from_dict({"ids": torch.ones(rows, 3)}, {"text": ["a"] * rows}, meta)


def deliver_on_four(
    brings: Callable[[int], Any], *, timeout_s: float = 20.0, late: dict[int, float] | None = None
) -> list[Any]:
    """What each of four ranks gets, or raises: ranks 0 1 and 2 3 share a batch, 0 and 2 lead; all have rows.

    Args:
        late: for how long a rank lets the others wait.
    """
    clock = Clock()
    store: Any = VirtualStore(clock)

    def rank_of(rank: int) -> Any:
        leader = rank - rank % 2
        share = RollCall(store.clone(), [leader, leader + 1], rank, f"dp {leader // 2}", timeout_s)
        leaders = RollCall(store.clone(), [0, 2], rank, "leaders", 2 * timeout_s) if rank == leader else None
        way = BatchDelivery(share, [], leaders=leaders, device=CPU, rows_on="every_rank")
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
    "other meta": (lambda: batch_of(step=2), "has another meta_info step"),
    "normalizers": (lambda: batch_of().with_normalizers(LossNormalizers(5, 2)), "has another normalizers"),
    "other objects": (lambda: batch_of().rename("text", "words"), "came with"),
}


@pytest.mark.parametrize("name", BROUGHT)
@pytest.mark.parametrize("bad", [0, 3])
def test_what_one_rank_brings_is_refused_to_all(name: str, bad: int) -> None:
    bring, message = BROUGHT[name]
    for heard in deliver_on_four(lambda rank: bring() if rank == bad else batch_of()):
        assert isinstance(heard, ValueError) and message in str(heard), heard


def test_memory_that_a_leader_lacks_is_heard_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def to(self: DataProto, device: Any) -> DataProto:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(DataProto, "to", to)
    for heard in deliver_on_four(lambda rank: batch_of()):
        assert isinstance(heard, ValueError) and "OutOfMemoryError: no memory" in str(heard)


def test_equal_meta_information_is_not_refused_and_metrics_are_each_ranks_own() -> None:
    def brings(rank: int) -> DataProto:
        order = [("a", {1, "x"}), ("b", {"k": torch.ones(2), "n": float("nan")})]
        return batch_of(**dict(order if rank % 2 else order[::-1]), metrics={"loss": rank})

    for rank, heard in enumerate(deliver_on_four(brings)):
        assert heard.meta_info["metrics"] == {"loss": [rank]}


def test_a_delivery_knows_where_rows_can_be() -> None:
    share = RollCall(HashStore(), [0], 0, "one", 1.0)
    with pytest.raises(ValueError, match="rows_on must be one of leader, every_rank; got 'all'"):
        BatchDelivery(share, [], device=CPU, rows_on="all")  # type: ignore[arg-type]
