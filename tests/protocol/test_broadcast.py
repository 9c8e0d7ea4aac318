"""How batches reach the ranks of a group, on real process groups."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.protocol import (
    DataProto,
    LossNormalizers,
    MicroBatchPlan,
    broadcast_batch,
    broadcast_obj,
    broadcast_tensors,
)
from tests.rank_pool import RankPool

NORMALIZERS = LossNormalizers(tokens=5, sequences=2)
PLAN = MicroBatchPlan(rows=((1, 0), (2, 3)), shares=(((0,), (1,)), ((1,), (0,))))


def many_tensors() -> dict[str, torch.Tensor]:
    """All kinds: dtypes, layouts, no element, no dimension, values that arithmetic would change."""
    return {
        "int": torch.tensor([[2**62 + 1, -1], [0, 5]]),
        "float": torch.tensor([float("nan"), float("-inf"), -0.0, 1e-42]),
        "bf16": torch.arange(6).view(2, 3).to(torch.bfloat16) / 7,
        "transposed": torch.arange(6.0).view(2, 3).T,
        "strided": torch.arange(10)[1::3],
        "expanded": torch.ones(1, 4, dtype=torch.bool).expand(3, 4),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "empty_too": torch.zeros(2, 0, dtype=torch.int32),
        "scalar": torch.tensor(7, dtype=torch.uint8),
        "needs_grad": torch.ones(2, requires_grad=True),
    }


def bits(tensors: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """Everything that must arrive: order, names, dtypes, shapes and each bit."""
    return [
        (name, str(x.dtype), tuple(x.shape), x.detach().clone().contiguous().flatten().view(torch.uint8).tolist())
        for name, x in tensors.items()
    ]


def receive_tensors() -> list[tuple[Any, ...]]:
    tensors = many_tensors() if dist.get_rank() == 0 else None
    received = broadcast_tensors(tensors, dist.group.WORLD, torch.device("cpu"))
    assert not any(tensor.requires_grad for tensor in received.values())
    return bits(received)


def receive_no_tensors() -> tuple[dict[str, torch.Tensor], str]:
    empty = broadcast_tensors({} if dist.get_rank() == 0 else None, dist.group.WORLD)
    with pytest.raises(ValueError, match="broadcast_tensors") as caught:
        broadcast_tensors(None, dist.group.WORLD)
    return empty, str(caught.value)


def pickled_bytes_of_a_large_batch() -> int:
    """How many bytes of a 4 MB tensor's broadcast go through pickle."""
    pickled = 0
    broadcast_object_list = dist.broadcast_object_list

    def counting(objects: list[Any], *args: Any, **kwargs: Any) -> None:
        nonlocal pickled
        pickled += len(pickle.dumps(objects))
        broadcast_object_list(objects, *args, **kwargs)

    dist.broadcast_object_list = counting  # type: ignore[assignment]
    try:
        broadcast_tensors({"x": torch.zeros(1000, 1000)}, dist.group.WORLD)
    finally:
        dist.broadcast_object_list = broadcast_object_list
    return pickled


def in_own_group(receive: Callable[[Any], Any], members: list[list[int]]) -> Any:
    """`receive` in the one of the groups of global ranks that this rank belongs to."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    return receive(groups[mine])


def object_of_leader(group: Any) -> Any:
    return broadcast_obj({"from": dist.get_rank()} if dist.get_rank(group) == 0 else "not mine", group)


def tensor_of_leader(group: Any) -> Any:
    return broadcast_tensors({"from": torch.tensor([dist.get_rank()])}, group)["from"].tolist()


def whole_batch() -> DataProto:
    ids = torch.arange(12).view(4, 3)
    data = DataProto.from_dict({"ids": ids, "mask": ids > 3}, {"text": list("abcd")}, {"step": 1})
    return data.with_plan(PLAN).with_normalizers(NORMALIZERS)


def report(data: DataProto) -> dict[str, Any]:
    return {
        "ids": data["ids"].tolist(),
        "mask": data["mask"].tolist(),
        "objects": {name: list(values) for name, values in data.non_tensor_batch.items()},
        "meta": data.meta_info,
        "step": (data.plan, data.normalizers),
    }


def receive_batch(non_tensor: bool, leader: int) -> dict[str, Any]:
    data = whole_batch() if dist.get_rank() == leader else whole_batch().stub()
    ranks = [leader, 1 - leader] if dist.get_world_size() == 2 else [0]
    group = dist.new_group(ranks, sort_ranks=False)
    return report(broadcast_batch(data, group, non_tensor=non_tensor))


def receive_batch_without_rows() -> tuple[int, str]:
    data = DataProto.from_dict({"ids": torch.zeros(0, 3)}, {"text": []})
    got = broadcast_batch(data if dist.get_rank() == 0 else data.stub(), dist.group.WORLD, non_tensor=True)
    return len(got), repr(got)


def refusal_of(kind: str) -> str:
    """What each rank raises when the leader's batch is bad, and that the group works afterwards."""
    data = whole_batch().stub()
    error: Exception | None = None
    if dist.get_rank() == 0:
        if kind == "value error":
            data, error = whole_batch(), ValueError("row 3 has 9 tokens, the model's context is 8")
        elif kind == "other error":
            data, error = whole_batch(), KeyError("ids")
        elif kind == "objects":
            data = DataProto.from_dict({"x": torch.zeros(1)}, {"f": [lambda: None]})
    with pytest.raises(ValueError, match=r"\w") as caught:
        broadcast_batch(data, dist.group.WORLD, non_tensor=True, error=error)
    assert caught.value is error or not isinstance(error, ValueError)
    assert broadcast_obj(dist.get_rank(), dist.group.WORLD) == 0
    return str(caught.value)


def two_levels(bad: bool) -> dict[str, Any] | str:
    """4 ranks as 2 stages of 2: the error of rank 0 passes level one (0, 1), then level two (0, 2) and (1, 3)."""
    first, *pipelines = (dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [1, 3]))
    rank = dist.get_rank()
    levels = ([first] if rank < 2 else []) + [pipelines[rank % 2]]
    data = whole_batch() if rank == 0 else whole_batch().stub()
    error: ValueError | None = ValueError("the leader's batch is bad") if rank == 0 and bad else None
    for group in levels:
        try:
            data = broadcast_batch(data, group, non_tensor=True, error=error)
        except ValueError as refused:
            error = refused
    return report(data) if error is None else str(error)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tensors_arrive_bit_for_bit(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(receive_tensors, world_size=world_size) == [bits(many_tensors())] * world_size


def test_no_tensors_arrive_and_none_is_an_error_everywhere(ranks: RankPool) -> None:
    message = "broadcast_tensors: the first rank has no tensors"
    assert ranks.run(receive_no_tensors, world_size=2) == [({}, message)] * 2


def test_the_values_of_tensors_are_not_pickled(ranks: RankPool) -> None:
    assert all(0 < size < 1000 for size in ranks.run(pickled_bytes_of_a_large_batch, world_size=2))


@pytest.mark.parametrize("receive", [object_of_leader, tensor_of_leader])
def test_the_first_of_each_group_leads(ranks: RankPool, receive: Callable[[Any], Any]) -> None:
    from_leaders = ranks.run(in_own_group, receive, [[0, 2], [1, 3]], world_size=4)
    values = [value["from"] if isinstance(value, dict) else value[0] for value in from_leaders]
    assert values == [0, 1, 0, 1]


@pytest.mark.parametrize("leader", [0, 1])
@pytest.mark.parametrize("non_tensor", [False, True])
def test_a_stub_gets_the_rows_and_keeps_the_rest(ranks: RankPool, non_tensor: bool, leader: int) -> None:
    results = ranks.run(receive_batch, non_tensor, leader, world_size=2)
    expected = report(whole_batch())
    assert results[leader] == expected
    if not non_tensor:
        expected["objects"] = {}
    assert results[1 - leader] == expected


def test_one_rank_alone_keeps_its_batch(ranks: RankPool) -> None:
    assert ranks.run(receive_batch, False, 0, world_size=1) == [report(whole_batch())]


def test_a_batch_without_rows_arrives(ranks: RankPool) -> None:
    (count, text), other = ranks.run(receive_batch_without_rows, world_size=2)
    assert count == 0 and other == (count, text)
    assert "ids: float32[0, 3]" in text and "text: object[0]" in text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value error", "row 3 has 9 tokens, the model's context is 8"),
        ("other error", "KeyError: 'ids'"),
        ("stub", "the first rank of the group has no rows, only a stub"),
        ("objects", "non_tensor_batch cannot be pickled: "),
    ],
)
def test_the_leaders_error_is_raised_on_every_rank(ranks: RankPool, kind: str, message: str) -> None:
    first, *others = ranks.run(refusal_of, kind, world_size=4, timeout=30)
    assert first.startswith(message)
    assert others == [first] * 3


def test_two_levels_bring_the_batch_to_every_rank(ranks: RankPool) -> None:
    assert ranks.run(two_levels, False, world_size=4) == [report(whole_batch())] * 4


def test_two_levels_bring_the_error_to_every_rank(ranks: RankPool) -> None:
    assert ranks.run(two_levels, True, world_size=4, timeout=30) == ["the leader's batch is bad"] * 4
