"""The groups of the process: who is in them, what is answered before and after, and what is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from roll.config import ParallelSettings
from roll.parallel.sequence import (
    SequenceParallelSampler,
    destroy_sequence_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_sequence_parallel_group,
    get_sequence_parallel_mesh,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    init_sequence_parallel,
    is_sequence_parallel_initialized,
    pad_for_sequence_parallel,
    reduce_sequence_parallel_loss,
    sequence_parallel_groups,
    split_for_sequence_parallel,
)
from roll.parallel.state import parallel_groups
from tests.rank_pool import RankPool


def refusal(call: Callable[[], Any]) -> str:
    """What it raises, kind and text."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was refused")


def describe(size: int) -> dict[str, Any]:
    with sequence_parallel_groups(size) as groups:
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=get_sequence_parallel_group())
        return {
            "sequence": dist.get_process_group_ranks(get_sequence_parallel_group()),
            "data": dist.get_process_group_ranks(get_data_parallel_group()),
            "sizes": (get_sequence_parallel_world_size(), get_data_parallel_world_size()),
            "ranks": (get_sequence_parallel_rank(), get_data_parallel_rank()),
            "sum": int(total),
            "mesh": (get_sequence_parallel_mesh().mesh_dim_names, groups.mesh.mesh.tolist()),
            "by_name": dist.get_process_group_ranks(groups.mesh.get_group("sequence")),
        }


def test_neighbours_share_a_sequence(ranks: RankPool) -> None:
    """Of four ranks at size 2: 0 1 | 2 3 share sequences, 0 2 | 1 3 share data."""
    found = ranks.run(describe, 2, world_size=4)
    assert [rank["sequence"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["data"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["ranks"] for rank in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [rank["sum"] for rank in found] == [1, 1, 5, 5]
    assert all(rank["sizes"] == (2, 2) for rank in found)
    assert all(rank["mesh"] == (("data", "sequence"), [[0, 1], [2, 3]]) for rank in found)
    assert [rank["by_name"] for rank in found] == [rank["sequence"] for rank in found]


@pytest.mark.parametrize("size", [1, 4])
def test_the_ends_of_the_range(ranks: RankPool, size: int) -> None:
    found = ranks.run(describe, size, world_size=4)
    assert [rank["sizes"] for rank in found] == [(size, 4 // size)] * 4


def life() -> dict[str, Any]:
    """What is answered at each stage."""
    found: dict[str, Any] = {}
    answers = (get_sequence_parallel_world_size, get_sequence_parallel_rank)
    found["before"] = [answer() for answer in answers]
    found["data before"] = (get_data_parallel_world_size(), get_data_parallel_rank() - dist.get_rank())
    tokens = torch.zeros(1, 3)
    found["pad before"] = pad_for_sequence_parallel(tokens)[0].shape[1]
    found["group before"] = refusal(get_sequence_parallel_group)
    groups = init_sequence_parallel(2)
    found["during"] = (get_sequence_parallel_world_size(), pad_for_sequence_parallel(tokens)[0].shape[1])
    found["same again"] = init_sequence_parallel(2) is groups
    found["another"] = refusal(lambda: init_sequence_parallel(1))
    found["still"] = get_sequence_parallel_world_size()
    destroy_sequence_parallel()
    destroy_sequence_parallel()
    calls: dict[str, Callable[[], Any]] = {
        "world size": get_sequence_parallel_world_size,
        "rank": get_sequence_parallel_rank,
        "data": get_data_parallel_rank,
        "group": get_sequence_parallel_group,
        "pad": lambda: pad_for_sequence_parallel(tokens),
        "split": lambda: split_for_sequence_parallel(tokens),
        "loss": lambda: reduce_sequence_parallel_loss(torch.tensor(1.0), 1),
        "sampler": lambda: SequenceParallelSampler([1, 2]),
    }
    found["after"] = {name: refusal(call) for name, call in calls.items()}
    found["initialised"] = is_sequence_parallel_initialized()
    with sequence_parallel_groups(1):  # another size is fine now
        found["anew"] = get_sequence_parallel_world_size()
    return found


def test_before_during_and_after(ranks: RankPool) -> None:
    """Asking before init answers 1 and does not pin it; after the teardown nothing is answered."""
    for found in ranks.run(life, world_size=2):
        assert found["before"] == [1, 0]
        assert found["data before"] == (2, 0)
        assert found["pad before"] == 3
        assert found["group before"].startswith("RuntimeError: sequence parallelism is not initialised")
        assert found["during"] == (2, 4)
        assert found["same again"]
        assert found["another"].startswith("RuntimeError: sequence parallelism of size 2 is initialised")
        assert found["still"] == 2
        assert set(found["after"].values()) == {
            "RuntimeError: the sequence-parallel groups were destroyed: call init_sequence_parallel again"
        }
        assert not found["initialised"]
        assert found["anew"] == 1


def misfits() -> dict[str, str]:
    own = dist.get_rank() + 1
    found = {
        "3 of 4": refusal(lambda: init_sequence_parallel(3)),
        "0": refusal(lambda: init_sequence_parallel(0)),
        "bool": refusal(lambda: init_sequence_parallel(True)),
        "text": refusal(lambda: init_sequence_parallel("2")),  # type: ignore[arg-type]
        "one rank has 3": refusal(lambda: init_sequence_parallel(3 if dist.get_rank() == 2 else 2)),
        "differ": refusal(lambda: init_sequence_parallel(2 if own > 2 else 4)),
    }
    assert not is_sequence_parallel_initialized()
    return found


def test_misfits_are_refused_on_every_rank(ranks: RankPool) -> None:
    found = ranks.run(misfits, world_size=4)
    assert all(rank == found[0] for rank in found)
    assert found[0] == {
        "3 of 4": "UserError: sequence_parallel_world_size 3 does not divide the 4 ranks",
        "0": "UserError: sequence_parallel_world_size must be a positive integer, got 0",
        "bool": "UserError: sequence_parallel_world_size must be a positive integer, got True",
        "text": "UserError: sequence_parallel_world_size must be a positive integer, got '2'",
        "one rank has 3": (
            "UserError: rank 2 of the group: sequence_parallel_world_size 3 does not divide the 4 ranks"
        ),
        "differ": "UserError: sequence_parallel_world_size differs between the ranks of the group: 4, 4, 2, 2",
    }


def test_without_torch_distributed() -> None:
    assert get_sequence_parallel_world_size() == get_data_parallel_world_size() == 1
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed: call init_dist"):
        init_sequence_parallel(1)
    destroy_sequence_parallel()  # nothing to do


def ended_with_torch_distributed() -> str:
    """The caller leaves torch.distributed without a teardown: the groups are gone, and are not taken for others."""
    store = dist.HashStore()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    init_sequence_parallel(1)
    dist.destroy_process_group()
    text = refusal(get_sequence_parallel_world_size)
    destroy_sequence_parallel()
    assert get_sequence_parallel_world_size() == 1
    return text


def test_groups_end_with_torch_distributed(ranks: RankPool) -> None:
    (text,) = ranks.run(ended_with_torch_distributed, world_size=1)
    assert text.startswith("RuntimeError: the sequence-parallel groups ended with torch.distributed")


def made_when_init_returned(make: Callable[[], AbstractContextManager[object]], rounds: int) -> list[int]:
    """How many ranks had made their last group when `make` gave this rank its groups."""
    store, counts, new_group = dist.distributed_c10d._get_default_store(), [], dist.new_group
    for number in range(rounds):
        made = 0

        def counted(*args: Any, number: int = number, **kwargs: Any) -> Any:
            nonlocal made
            group, made = new_group(*args, **kwargs), made + 1
            store.set(f"{number}/{dist.get_rank()}", str(made))
            return group

        where = "torch.distributed.new_group", "torch.distributed.distributed_c10d.new_group"
        with patch(where[0], counted), patch(where[1], counted), make():
            keys = [f"{number}/{rank}" for rank in range(dist.get_world_size())]
            counts.append(sum(store.check([key]) and int(store.get(key)) == made for key in keys))
    return counts


@pytest.mark.parametrize("make", [partial(sequence_parallel_groups, 4), partial(parallel_groups, ParallelSettings())])
def test_no_rank_goes_on_before_all_have_made_their_groups(
    ranks: RankPool, make: Callable[[], AbstractContextManager[object]]
) -> None:
    """Else one that leaves at once would break the connections that slower ranks are making."""
    assert ranks.run(made_when_init_returned, make, 8, world_size=4) == [[4] * 8] * 4
