"""How objects and tensors reach the ranks of a group, on real process groups."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.protocol import broadcast_obj, broadcast_tensors
from tests.rank_pool import RankPool


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
