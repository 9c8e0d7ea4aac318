"""The batch sampler: steps worked out by hand, shares of ranks, ramp-up, and going on from a position."""

from __future__ import annotations

from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data import PackBatchSampler, RampUp
from roll.data.batch_sampler import PackAddress, Position

START = Position()


def packs(sampler: PackBatchSampler, position: Position = START, steps: int | None = None) -> list[list[int | None]]:
    """Pack numbers of each step."""
    return [[address.pack for address in step] for step, _ in islice(sampler.steps(position), steps)]


def global_steps(settings: dict[str, int | bool | RampUp | None], dp_size: int) -> list[list[PackAddress]]:
    """The packs of all ranks in each step, in rank order."""
    samplers = [PackBatchSampler(dp_rank=rank, dp_size=dp_size, **settings) for rank in range(dp_size)]  # type: ignore[arg-type]
    shares = [[step for step, _ in sampler.steps(START)] for sampler in samplers]
    return [list(chain(*ranks)) for ranks in zip(*shares, strict=True)]  # strict: every rank has as many steps


@pytest.mark.parametrize(
    ("drop_last", "rank", "expected"),
    [
        (False, 0, [[0, 1], [4, 5], [0, 1], [4, 5]]),
        (False, 1, [[2, 3], [6, None], [2, 3], [6, None]]),
        (True, 0, [[0, 1], [0, 1]]),
        (True, 1, [[2, 3], [2, 3]]),
    ],
)
def test_seven_packs_for_two_ranks(drop_last: bool, rank: int, expected: list[list[int | None]]) -> None:
    sampler = PackBatchSampler(7, micro_num=2, dp_rank=rank, dp_size=2, drop_last=drop_last, epochs=2)
    assert packs(sampler) == expected
    assert sampler.remaining_steps(START) == len(expected)


def test_a_rank_may_have_nothing_but_padding() -> None:
    sampler = PackBatchSampler(1, micro_num=2, dp_rank=1, dp_size=2, epochs=1)
    assert packs(sampler) == [[None, None]]


def test_epochs_go_on_without_end() -> None:
    sampler = PackBatchSampler(3, micro_num=2)
    assert sampler.remaining_steps(START) is None
    found = [step for step, _ in islice(sampler.steps(START), 4)]
    assert found == [
        [PackAddress(0, 0), PackAddress(0, 1)],
        [PackAddress(0, 2), PackAddress(0, None)],
        [PackAddress(1, 0), PackAddress(1, 1)],
        [PackAddress(1, 2), PackAddress(1, None)],
    ]


def test_ramp_up() -> None:
    ramp_up = RampUp(start=1, increment=2, every=2)
    sampler = PackBatchSampler(100, micro_num=4, ramp_up=ramp_up)
    assert [len(step) for step in packs(sampler, steps=7)] == [1, 1, 3, 3, 4, 4, 4]
    # The ramp counts steps of all epochs: the second epoch of three packs does not begin with one again.
    again = PackBatchSampler(3, micro_num=2, ramp_up=RampUp(start=1, increment=1, every=2), epochs=2)
    assert packs(again) == [[0], [1], [2, None], [0, 1], [2, None]]


@given(
    num_packs=st.integers(1, 30),
    micro_num=st.integers(1, 4),
    dp_size=st.integers(1, 4),
    every=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_shares_are_disjoint_and_cover_the_epoch(
    num_packs: int, micro_num: int, dp_size: int, every: int, drop_last: bool
) -> None:
    if drop_last and num_packs < micro_num * dp_size:
        num_packs = micro_num * dp_size
    ramp_up = RampUp(1, 1, every) if every else None
    settings = {"num_packs": num_packs, "micro_num": micro_num, "ramp_up": ramp_up, "drop_last": drop_last, "epochs": 2}
    steps = global_steps(settings, dp_size)
    for epoch in range(2):
        seen = [address.pack for step in steps for address in step if address.epoch == epoch]
        real = [pack for pack in seen if pack is not None]
        assert real == list(range(len(real)))  # each once, in order
        if drop_last:
            assert len(real) == len(seen) > num_packs - micro_num * dp_size
        else:
            assert len(real) == num_packs
            assert len(seen) - len(real) < micro_num * dp_size  # padding within one step, at its end
            assert seen[: len(real)] == real


@given(
    num_packs=st.integers(8, 30),
    steps=st.integers(0, 20),
    before=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4)]),
    after=st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 4)]),
    drop_last=st.booleans(),
)
def test_going_on_with_other_ranks_continues_the_same_stream(
    num_packs: int, steps: int, before: tuple[int, int], after: tuple[int, int], drop_last: bool
) -> None:
    first = PackBatchSampler(num_packs, micro_num=before[0], dp_size=before[1], drop_last=drop_last)
    position = START
    for _ in range(steps):
        found = first.step(position)
        assert found is not None
        position = found[1]
    samplers = [
        PackBatchSampler(
            num_packs, micro_num=after[0], dp_rank=rank, dp_size=after[1], drop_last=drop_last, epochs=9999
        )
        for rank in range(after[1])
    ]
    rest = [
        address
        for ranks in zip(*(islice(sampler.steps(position), num_packs) for sampler in samplers), strict=True)
        for share, _ in ranks
        for address in share
        if address.epoch == position.epoch and address.pack is not None
    ]
    left = num_packs - position.pack
    if drop_last:
        left -= left % (after[0] * after[1])
    assert [address.pack for address in rest] == list(range(position.pack, position.pack + left))


@given(st.integers(0, 15), st.booleans())
def test_resume_at_any_step_gives_the_same_steps(stopped: int, drop_last: bool) -> None:
    sampler = PackBatchSampler(
        11, micro_num=3, dp_rank=1, dp_size=2, ramp_up=RampUp(1, 1, 3), drop_last=drop_last, epochs=20
    )
    whole = list(sampler.steps(START))
    position = whole[stopped - 1][1] if stopped else START
    again = Position(**position.state_dict())
    assert list(sampler.steps(again)) == whole[stopped:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_num": 0}, "micro_num must be at least 1, got 0"),
        ({"num_packs": 0}, "num_packs must be at least 1, got 0"),
        ({"dp_size": 0}, "dp_size must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank=2 is not one of dp_size=2 ranks"),
        ({"ramp_up": RampUp(3, 1, 1)}, "ramp_up.start=3 is over micro_num=2"),
        (
            {"drop_last": True, "dp_size": 3},
            r"5 packs, fewer than the 6 of one step \(micro_num=2 \* dp_size=3\), and drop_last is set",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackBatchSampler(**{"num_packs": 5, "micro_num": 2} | settings)  # type: ignore[arg-type]


def test_a_ramp_that_does_not_rise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ramp_up\.every must be at least 1, got 0"):
        RampUp(1, 1, 0)
