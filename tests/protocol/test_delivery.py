"""What a rank has after a delivery, on two ranks; `tests/strategies/test_data_input.py` has eight."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.protocol import (
    BatchDelivery,
    DataProto,
    LossNormalizers,
    MicroBatchPlan,
    RollCall,
    broadcast,
    broadcast_obj,
    delivery,
)
from tests.rank_pool import RankPool

PLAN = MicroBatchPlan(rows=((1, 0), (2, 3)), shares=(((0,), (1,)), ((1,), (0,))))


def delivery_of(ranks: tuple[int, ...], group: Any = None) -> BatchDelivery:
    """Over one group, whose first rank leads."""
    group = group or dist.group.WORLD
    call = RollCall(dist.group.WORLD.get_group_store().clone(), ranks, dist.get_rank(), "all", 20.0)
    return BatchDelivery(call, [group], device=torch.device("cpu"))


def whole_batch() -> DataProto:
    ids = torch.arange(12).view(4, 3)
    data = DataProto.from_dict({"ids": ids, "mask": ids > 3}, {"text": list("abcd")}, {"step": 1})
    return data.with_plan(PLAN).with_normalizers(LossNormalizers(tokens=5, sequences=2))


def report(data: DataProto) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.tolist() for name, tensor in data.tensors.items()},
        "objects": {name: list(values) for name, values in data.non_tensor_batch.items()},
        "meta": data.meta_info,
        "step": (data.plan, data.normalizers),
    }


def receive(leader: int, non_tensor: bool, few_bytes: int) -> list[dict[str, Any]]:
    """A batch, a larger one, one without rows and one without bytes, one after the other.

    Those of more than `few_bytes` go in pieces of 16 bytes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "FEW_BYTES", few_bytes)
        patch.setattr(broadcast, "PIECE_BYTES", 16)
        return _receive(leader, non_tensor)


def _receive(leader: int, non_tensor: bool) -> list[dict[str, Any]]:
    ranks = (leader, 1 - leader) if dist.get_world_size() == 2 else (0,)
    way = delivery_of(ranks, dist.new_group(list(ranks), sort_ranks=False))
    whole = whole_batch()
    batches = [whole[:2], whole, whole[:0], whole.select([], []), whole]
    leads = dist.get_rank() == leader
    received = [way.deliver(batch if leads else batch.stub(), non_tensor=non_tensor) for batch in batches]
    assert not leads or all(
        a["ids"].data_ptr() == b["ids"].data_ptr() for a, b in zip(received[:2], batches[:2], strict=True)
    )
    return [report(data) for data in received]  # after all of them: none may have changed another


@pytest.mark.parametrize(("world_size", "leader"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("non_tensor", [False, True])
@pytest.mark.parametrize("few_bytes", [delivery.FEW_BYTES, 60, -1])  # all with the decision, some, none
def test_rows_are_replaced_and_the_rest_stays(
    ranks: RankPool, world_size: int, leader: int, non_tensor: bool, few_bytes: int
) -> None:
    results = ranks.run(receive, leader, non_tensor, few_bytes, world_size=world_size)
    whole = whole_batch()
    expected = [report(batch) for batch in (whole[:2], whole, whole[:0], whole.select([], []), whole)]
    assert results.pop(leader) == expected
    of_others = [batch if non_tensor else batch | {"objects": {}} for batch in expected]
    assert results == [of_others] * (world_size - 1)


class Sneaky:
    """A value that notices when it is pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Sneaky.pickled += 1
        return (Sneaky, ())


def what_is_pickled() -> tuple[int, int]:
    """The longest pickle of a delivery of 4 MB, and how often objects are pickled that nobody asked for."""
    longest = 0
    dumps = pickle.dumps

    def noting(value: Any, *args: Any, **kwargs: Any) -> bytes:
        nonlocal longest
        longest = max(longest, len(dumps(value, *args, **kwargs)))
        return dumps(value, *args, **kwargs)

    batch = DataProto.from_dict({"x": torch.zeros(1000, 1000)}, {"o": [Sneaky() for _ in range(1000)]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "dumps", noting)
        delivery_of((0, 1)).deliver(batch if dist.get_rank() == 0 else batch.stub(), non_tensor=False)
    return longest, Sneaky.pickled


def test_neither_values_nor_objects_that_nobody_asked_for_are_pickled(ranks: RankPool) -> None:
    for longest, objects in ranks.run(what_is_pickled, world_size=2):
        assert 0 < longest < 1000 and objects == 0


def the_leaders_own_error() -> tuple[bool, str]:
    error = ValueError("row 3 has 9 tokens, the model's context is 8")

    def refuse(batch: DataProto) -> None:
        raise error

    way = delivery_of((0, 1))
    with pytest.raises(ValueError, match="row 3") as caught:
        way.deliver(whole_batch(), non_tensor=False, check=refuse)
    assert broadcast_obj(dist.get_rank(), dist.group.WORLD) == 0  # the group works
    return caught.value is error, str(caught.value)


def test_the_leader_raises_its_error_itself(ranks: RankPool) -> None:
    message = "row 3 has 9 tokens, the model's context is 8"
    assert ranks.run(the_leaders_own_error, world_size=2) == [(True, message), (False, message)]


class OnlyHere:
    """An object that no other process can make."""

    def __reduce__(self) -> tuple[Any, ...]:
        return made_in, (os.getpid(),)


def made_in(process: int) -> OnlyHere:
    if process != os.getpid():
        raise RuntimeError("cannot be made here")
    return OnlyHere()


def objects_that_cannot_be_read() -> list[str]:
    """The errors of objects that a receiver cannot make and of ones that the leader cannot pickle."""
    heard = []
    way, batch = delivery_of((0, 1)), DataProto.from_dict({"x": torch.ones(1)}, {"o": [OnlyHere()]})
    with pytest.raises(ValueError, match="unpickled") as caught:
        way.deliver(batch, non_tensor=True)
    heard.append(str(caught.value))
    with pytest.raises(ValueError, match="broadcast_obj") as caught:
        broadcast_obj(lambda: 0, dist.group.WORLD)
    heard.append(str(caught.value))
    assert broadcast_obj(dist.get_rank(), dist.group.WORLD) == 0  # the group works
    return heard


def test_objects_that_one_rank_cannot_read_or_write_are_refused_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(objects_that_cannot_be_read, world_size=2)
    assert first == second
    assert "rank 1: non_tensor_batch cannot be unpickled: RuntimeError: cannot be made here" in first[0]
