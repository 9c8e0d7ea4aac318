"""Groups of real ranks: their members, their end, and what happens when they cannot be made."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from roll.config import ParallelSettings
from roll.parallel import ParallelDegrees
from roll.parallel.state import destroy_parallel, init_parallel, parallel_groups
from tests.launched import launched
from tests.rank_pool import RankPool

DOCUMENT_ORDER = "tp-cp-ep-pp-dp"
MEGATRON_ORDER = "tp-cp-ep-dp-pp"
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tp": 2}),
    (4, {}),
    (4, {"tp": 2}),
    (4, {"pp": 2}),
    (4, {"tp": 2, "pp": 2}),
    (4, {"cp": 2, "pp": 2}),
    (4, {"tp": 2, "cp": 2}),
]
# Megatron-Core 0.16.1 refuses context parallelism in pipelines of neighbours (parallel_state.py:811).
CASES = [
    (world_size, layout, order)
    for world_size, layout in LAYOUTS
    for order in (DOCUMENT_ORDER, MEGATRON_ORDER)
    if not ({"cp", "pp"} <= layout.keys() and order == DOCUMENT_ORDER)
]


def groups_exist() -> bool:
    from megatron.core import parallel_state as mpu

    return bool(mpu.model_parallel_is_initialized())


def describe_groups(settings: ParallelSettings) -> dict[str, Any]:
    """What this rank sees: members of its groups, its place in each, and the sum of the ranks in each."""
    with parallel_groups(settings) as state:
        groups = {"tp": state.tp, "pp": state.pp, "dp": state.dp, "tp-cp": state.tp_cp, "cp": state.megatron.cp}
        sums = {}
        for axes, group in groups.items():
            total = torch.tensor([state.rank])
            dist.all_reduce(total, group=group)
            sums[axes] = int(total)
        return {
            "rank": state.rank,
            "at": state.at,
            "members": {axes: dist.get_process_group_ranks(group) for axes, group in groups.items()},
            "places": {axes: group.rank() for axes, group in groups.items()},
            "sums": sums,
            "stages": (state.is_first_stage, state.is_last_stage),
            "roles": (state.is_leader, state.is_reporter),
        }


def state_after_the_end(settings: ParallelSettings) -> tuple[bool, bool, int]:
    """Whether the groups were there, whether they are gone, and a sum over the caller's own process group, which
    stays: the pool joined torch.distributed, not `init_parallel`.
    """
    init_parallel(settings)
    alive = groups_exist()
    destroy_parallel()
    gone = not groups_exist()
    destroy_parallel()  # without groups: nothing to do
    total = torch.ones(1)
    dist.all_reduce(total)
    return alive, gone, int(total)


def refusal(settings: ParallelSettings) -> tuple[str, bool, bool]:
    try:
        init_parallel(settings)
    except ValueError as refused:
        return str(refused), groups_exist(), dist.is_initialized()
    raise AssertionError("a misfit was accepted")


def second_init(settings: ParallelSettings) -> tuple[str, int]:
    """The refusal of a second init, and a sum over the tensor-parallel group of the first afterwards."""
    state = init_parallel(settings)
    with pytest.raises(RuntimeError) as refused:
        init_parallel(settings)
    total = torch.ones(1)
    dist.all_reduce(total, group=state.tp)
    destroy_parallel()
    return str(refused.value), int(total)


def refused_block(settings: ParallelSettings) -> int:
    """A block whose groups cannot be made leaves the caller's own process group as it is."""
    with pytest.raises(ValueError, match="world_size"), parallel_groups(settings):
        raise AssertionError("a misfit was accepted")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def failing_block() -> tuple[bool, bool]:
    """Whether Megatron-Core's groups and the caller's process group are there after a block that failed."""
    with pytest.raises(KeyError, match="inside"), parallel_groups(ParallelSettings()):
        raise KeyError("inside")
    return groups_exist(), dist.is_initialized()


def generators_around_init(settings: ParallelSettings) -> list[bool]:
    """Whether torch's, NumPy's and Python's generators stand where they stood."""
    torch.manual_seed(1234)
    before = torch.get_rng_state(), repr(np.random.get_state(legacy=False)), random.getstate()  # noqa: NPY002
    with parallel_groups(settings):
        after = torch.get_rng_state(), repr(np.random.get_state(legacy=False)), random.getstate()  # noqa: NPY002
    return [torch.equal(before[0], after[0]), before[1] == after[1], before[2] == after[2]]


def world_of_its_own() -> tuple[list[int], bool]:
    """One process without a launcher, twice in a row; what `init_parallel` joined is left at the end."""
    dist.destroy_process_group()
    sizes = []
    without = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    with patch.dict(os.environ, without, clear=True):
        for _ in range(2):
            with parallel_groups(ParallelSettings()) as state:
                dist.all_reduce(torch.ones(1), group=state.dp)
                sizes.append(dist.get_world_size())
    return sizes, dist.is_initialized()


def blocks_in_a_row(agent: bool) -> list[tuple[int, bool]]:
    """Under a launcher: the sum of the ranks in each of three blocks, and whether torch.distributed is joined after."""
    seen = []
    with launched(agent=agent):
        for layout in ({"tp": 2}, {"pp": 2}, {}):
            with parallel_groups(ParallelSettings(**layout), timeout_s=30) as state:
                total = torch.tensor([state.rank])
                dist.all_reduce(total)
            seen.append((int(total), dist.is_initialized()))
    return seen


@pytest.mark.parametrize("agent", [True, False])
def test_blocks_in_one_process_make_groups_anew(ranks: RankPool, agent: bool) -> None:
    assert ranks.run(blocks_in_a_row, agent, world_size=2) == [[(1, False)] * 3] * 2


@pytest.mark.parametrize(("world_size", "layout", "order"), CASES)
def test_groups_have_the_members_that_the_arithmetic_says(
    ranks: RankPool, world_size: int, layout: dict[str, Any], order: str
) -> None:
    degrees = ParallelDegrees(world_size, **layout, order=order)
    seen = ranks.run(describe_groups, ParallelSettings(**layout, rank_order=order), world_size=world_size)
    for rank, found in enumerate(seen):
        assert found["rank"] == rank
        assert found["at"] == degrees.coordinates(rank)
        for axes, members in found["members"].items():
            assert members == degrees.group_of(rank, axes), axes
            assert found["places"][axes] == members.index(rank)
            assert found["sums"][axes] == sum(members)
        assert {axis: found["places"][axis] for axis in ("tp", "cp", "dp", "pp")} == vars(found["at"])
        assert found["stages"] == (found["at"].pp == 0, found["at"].pp == degrees.pp - 1)
        assert found["roles"] == (rank in degrees.leaders, rank in degrees.reporters)


def test_pipelines_of_both_orders(ranks: RankPool) -> None:
    # By hand, four ranks with pp 2 and dp 2: stages are neighbours in the document's order, two apart in the default.
    for order, expected in ((DOCUMENT_ORDER, [[0, 1], [2, 3]]), (MEGATRON_ORDER, [[0, 2], [1, 3]])):
        seen = ranks.run(describe_groups, ParallelSettings(pp=2, rank_order=order), world_size=4)
        assert all(found["members"]["pp"] in expected for found in seen)


def test_destroyed_groups_are_gone(ranks: RankPool) -> None:
    assert ranks.run(state_after_the_end, ParallelSettings(tp=2), world_size=2) == [(True, True, 2)] * 2


def test_an_error_inside_a_block_ends_the_groups(ranks: RankPool) -> None:
    assert ranks.run(failing_block, world_size=2) == [(False, True)] * 2


@pytest.mark.parametrize(
    ("world_size", "layout", "message"),
    [
        (4, {"tp": 3}, "world_size 4 is not a multiple of tp 3 x pp 1 x cp 1 = 3"),
        (2, {"tp": 2, "pp": 2}, "world_size 2 is not a multiple of tp 2 x pp 2 x cp 1 = 4"),
    ],
)
def test_a_misfit_is_refused_on_every_rank(
    ranks: RankPool, world_size: int, layout: dict[str, Any], message: str
) -> None:
    # No groups were made, and the caller's own default group is still there.
    refusals = ranks.run(refusal, ParallelSettings(**layout), world_size=world_size)
    assert refusals == [(message, False, True)] * world_size


def test_a_refused_block_leaves_the_callers_process_group(ranks: RankPool) -> None:
    assert ranks.run(refused_block, ParallelSettings(tp=3), world_size=2) == [2, 2]


def test_a_second_init_is_refused_and_the_first_stays_usable(ranks: RankPool) -> None:
    for message, total in ranks.run(second_init, ParallelSettings(tp=2), world_size=2):
        assert "parallel groups exist already" in message
        assert "destroy_parallel()" in message
        assert total == 2


def test_init_draws_no_random_numbers(ranks: RankPool) -> None:
    settings = ParallelSettings(tp=2, mode="fsp")
    assert ranks.run(generators_around_init, settings, world_size=2) == [[True, True, True]] * 2


def test_one_process_needs_no_launcher(ranks: RankPool) -> None:
    assert ranks.run(world_of_its_own, world_size=1) == [([1, 1], False)]
