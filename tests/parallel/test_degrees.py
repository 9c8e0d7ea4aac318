"""The arithmetic of ranks: the document's table of 8 ranks, Megatron-Core's own order, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config import ParallelSettings
from roll.parallel import ParallelDegrees, RankCoordinates

DOCUMENT_ORDER = "tp-cp-ep-pp-dp"
MEGATRON_ORDER = "tp-cp-ep-dp-pp"

# Rank by rank (dp, pp, tp) of 8 ranks with dp 2, pp 2, tp 2. The first list is the document's table; in the second the
# data-parallel rank varies before the stage: rank = tp + 2 dp + 4 pp.
COORDINATES = {
    DOCUMENT_ORDER: [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)],
    MEGATRON_ORDER: [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)],
}
GROUPS = {
    DOCUMENT_ORDER: {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "cp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "tp-cp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "tp-pp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "tp-dp": [[0, 1, 4, 5], [2, 3, 6, 7]],
    },
    MEGATRON_ORDER: {
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "cp": [[0], [1], [2], [3], [4], [5], [6], [7]],
        "tp-cp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "tp-pp": [[0, 1, 4, 5], [2, 3, 6, 7]],
        "tp-dp": [[0, 1, 2, 3], [4, 5, 6, 7]],
    },
}
LEADERS = {DOCUMENT_ORDER: (0, 4), MEGATRON_ORDER: (0, 2)}
REPORTERS = {DOCUMENT_ORDER: (2, 6), MEGATRON_ORDER: (4, 6)}

AXES = ("tp", "cp", "dp", "pp")


@pytest.fixture(params=[DOCUMENT_ORDER, MEGATRON_ORDER])
def eight(request: pytest.FixtureRequest) -> ParallelDegrees:
    return ParallelDegrees(8, tp=2, pp=2, order=request.param)


@st.composite
def some_degrees(draw: st.DrawFn) -> ParallelDegrees:
    """Degrees of 1 to 3 on each axis, in any order of the axes."""
    tp, cp, dp, pp = (draw(st.integers(1, 3)) for _ in range(4))
    order = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp", "pp"])))
    return ParallelDegrees(tp * cp * dp * pp, tp=tp, pp=pp, cp=cp, order=order)


def test_the_default_order_is_megatron_cores() -> None:
    assert ParallelDegrees(8).order == MEGATRON_ORDER


def test_coordinates_of_eight_ranks(eight: ParallelDegrees) -> None:
    assert eight.dp == 2
    found = [eight.coordinates(rank) for rank in range(8)]
    assert [(at.dp, at.pp, at.tp) for at in found] == COORDINATES[eight.order]
    assert [at.cp for at in found] == [0] * 8


def test_groups_of_eight_ranks(eight: ParallelDegrees) -> None:
    for axes, expected in GROUPS[eight.order].items():
        assert eight.groups(axes) == expected, axes
        for group in expected:
            assert all(eight.group_of(rank, axes) == group for rank in group)


def test_leaders_and_reporters_of_eight_ranks(eight: ParallelDegrees) -> None:
    assert eight.leaders == LEADERS[eight.order]
    assert eight.reporters == REPORTERS[eight.order]


def test_unequal_degrees() -> None:
    # tp 2, dp 3, pp 2 in the default order: rank = tp + 2 dp + 6 pp.
    degrees = ParallelDegrees(12, tp=2, pp=2)
    assert degrees.dp == 3
    assert degrees.coordinates(9) == RankCoordinates(tp=1, cp=0, dp=1, pp=1)
    assert degrees.groups("dp") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert degrees.leaders == (0, 2, 4)
    assert degrees.reporters == (6, 8, 10)


def test_context_parallel_ranks_share_the_leader() -> None:
    # rank = tp + 2 cp + 4 pp
    degrees = ParallelDegrees(8, tp=2, cp=2, pp=2)
    assert degrees.model_parallel_size == 8
    assert degrees.dp == 1
    assert degrees.groups("tp-cp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert degrees.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (degrees.leaders, degrees.reporters) == ((0,), (4,))


def test_degrees_of_settings() -> None:
    settings = ParallelSettings(tp=2, pp=3, cp=1, rank_order=DOCUMENT_ORDER)
    assert ParallelDegrees.of(settings, 12) == ParallelDegrees(12, tp=2, pp=3, cp=1, order=DOCUMENT_ORDER)
    with pytest.raises(ValueError, match="world_size 6 is not a multiple of sp 4 x pp 1 = 4"):
        ParallelDegrees.of(ParallelSettings(mode="isp", sp=4), 6)


def test_weight_parallel_groups() -> None:
    # InternEvo's example of 16 ranks (internevo.md 3.5): sequence groups of 4, two stages, weight groups of 2. With
    # stages outermost, as there: sequence [0-3], weights [0, 1], replicas of a part of the weights [0, 2, 4, 6].
    settings = ParallelSettings(mode="isp", sp=4, wp=2, pp=2)
    degrees = ParallelDegrees.of(settings, 16)
    assert degrees.groups("cp")[0] == [0, 1, 2, 3]
    assert degrees.dp == 2
    mesh = degrees.weight_mesh()
    assert mesh[0] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [pair[0] for pair in mesh[0]] == [0, 2, 4, 6]
    assert mesh[1] == [[8, 9], [10, 11], [12, 13], [14, 15]]
    # Weights may be split over more ranks than the sequence: then several data-parallel shares hold one copy.
    assert ParallelDegrees(8, cp=2, wp=4, pp=2).weight_mesh() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    # Stages that are neighbours: the ranks of a stage are two apart.
    assert ParallelDegrees(4, wp=2, pp=2, order=DOCUMENT_ORDER).weight_mesh() == [[[0, 2]], [[1, 3]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 6, "tp": 4}, r"world_size 6 is not a multiple of tp 4 x pp 1 x cp 1 = 4"),
        ({"world_size": 8, "tp": 2, "pp": 3, "cp": 2}, r"world_size 8 is not a multiple of tp 2 x pp 3 x cp 2 = 12"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"world_size": 8, "tp": 0}, "tp must be at least 1, got 0"),
        ({"world_size": 8, "pp": -2}, "pp must be at least 1, got -2"),
        ({"world_size": 6, "cp": 2, "wp": 4}, r"wp 4 does not divide the 6 ranks of a stage \(cp 2 x dp 3\)"),
        ({"world_size": 8, "cp": 0}, "cp must be at least 1, got 0"),
        ({"world_size": 8, "order": "tp-cp-dp-pp"}, "rank_order .* tp-cp-ep-dp-pp once, got 'tp-cp-dp-pp'"),
        ({"world_size": 8, "order": "tp-tp-cp-ep-dp-pp"}, "got 'tp-tp-cp-ep-dp-pp'"),
        ({"world_size": 8, "order": "tp-sp-ep-dp-pp"}, "got 'tp-sp-ep-dp-pp'"),
        ({"world_size": 8, "order": ""}, "got ''"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDegrees(**arguments)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_refused(eight: ParallelDegrees, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 8 ranks"):
        eight.coordinates(rank)


@given(some_degrees())
def test_coordinates_and_rank_are_inverse(degrees: ParallelDegrees) -> None:
    seen = set()
    for rank in range(degrees.world_size):
        at = degrees.coordinates(rank)
        assert degrees.rank_at(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        seen.add(at)
    assert len(seen) == degrees.world_size


@given(some_degrees(), st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world(degrees: ParallelDegrees, axes: set[str]) -> None:
    groups = degrees.groups("-".join(sorted(axes)))
    assert sorted(rank for group in groups for rank in group) == list(range(degrees.world_size))
    for group in groups:
        assert group == sorted(group)
        # The ranks of a group differ on its axes only, and take every place there is on them.
        fixed = {tuple(getattr(degrees.coordinates(rank), axis) for axis in set(AXES) - axes) for rank in group}
        varying = {tuple(getattr(degrees.coordinates(rank), axis) for axis in axes) for rank in group}
        assert len(fixed) == 1
        assert len(varying) == len(group)


@given(some_degrees())
def test_leaders_and_reporters_stand_at_both_ends_of_the_pipelines(degrees: ParallelDegrees) -> None:
    for stage, ranks in ((0, degrees.leaders), (degrees.pp - 1, degrees.reporters)):
        expected = [RankCoordinates(tp=0, cp=0, dp=dp, pp=stage) for dp in range(degrees.dp)]
        assert [degrees.coordinates(rank) for rank in ranks] == expected


@given(some_degrees())
def test_groups_are_megatron_cores(degrees: ParallelDegrees) -> None:
    from megatron.core.parallel_state import RankGenerator

    theirs = RankGenerator(tp=degrees.tp, ep=1, dp=degrees.dp, pp=degrees.pp, cp=degrees.cp, order=degrees.order)
    for axes in ("tp", "cp", "dp", "pp", "tp-cp", "tp-pp", "dp-cp", "tp-dp-cp"):
        assert degrees.groups(axes) == sorted(theirs.get_ranks(axes)), axes
