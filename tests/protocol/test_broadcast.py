"""How objects reach the ranks of a group, on real process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from roll.protocol import broadcast_obj
from tests.rank_pool import RankPool


def in_own_group(receive: Callable[[Any], Any], members: list[list[int]]) -> Any:
    """`receive` in the one of the groups of global ranks that this rank belongs to."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    return receive(groups[mine])


def object_of_leader(group: Any) -> Any:
    return broadcast_obj({"from": dist.get_rank()} if dist.get_rank(group) == 0 else "not mine", group)


def test_the_first_of_each_group_leads(ranks: RankPool) -> None:
    from_leaders = ranks.run(in_own_group, object_of_leader, [[0, 2], [1, 3]], world_size=4)
    assert [value["from"] for value in from_leaders] == [0, 1, 0, 1]
