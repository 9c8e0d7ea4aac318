"""The micro-batch plan: every guarantee of plan_micro_batches, on examples and on drawn lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.plan import _Bin, _halve, _Row, plan_micro_batches
from roll.protocol.plan import MicroBatchPlan

LENGTHS = st.lists(st.integers(0, 50), max_size=24)


def tokens_of(plan: MicroBatchPlan, lengths: list[int]) -> list[list[list[int]]]:
    """The lengths of the rows of each micro-batch of each rank."""
    return [
        [[lengths[rows[position]] for position in micro_batch] for micro_batch in share]
        for rows, share in zip(plan.rows, plan.shares, strict=True)
    ]


def test_a_plan_by_hand() -> None:
    # Longest first: 9 to rank 0, 5 to rank 1, 3 to rank 1 (8 < 9), then a 1 to rank 1 (8 < 9), which is full;
    # the other two to rank 0. Budget 9: rank 0 needs {9} {1, 1}, rank 1 {5, 3, 1}: two each, work spread evenly.
    plan = plan_micro_batches([5, 3, 9, 1, 1, 1], 2, max_tokens=9)
    assert plan.rows == ((2, 4, 5), (0, 1, 3))
    assert plan.shares == (((0,), (1, 2)), ((0,), (1, 2)))


def test_rows_of_one_rank_stay_in_order() -> None:
    plan = plan_micro_batches([3, 9, 1, 2, 4], 1, rows=2)
    assert plan.rows == ((0, 1, 2, 3, 4),)
    assert plan.shares == (((0, 1), (2, 3), (4,)),)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80), st.integers(1, 3))
def test_the_token_budget_is_a_hard_cap(lengths: list[int], dp_size: int, max_tokens: int, multiple_of: int) -> None:
    plan = plan_micro_batches(lengths, dp_size, max_tokens=max_tokens, multiple_of=multiple_of)
    for share in tokens_of(plan, lengths):
        assert all(sum(tokens) <= max_tokens or len(tokens) == 1 for tokens in share)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80), st.integers(1, 3))
def test_all_rows_once_in_equally_many_micro_batches(
    lengths: list[int], dp_size: int, max_tokens: int, multiple_of: int
) -> None:
    plan = plan_micro_batches(lengths, dp_size, max_tokens=max_tokens, multiple_of=multiple_of)
    assert sorted(row for rows in plan.rows for row in rows) == list(range(len(lengths)))
    assert len(plan.rows) == len(plan.shares) == dp_size
    for rows, share in zip(plan.rows, plan.shares, strict=True):
        assert list(rows) == sorted(rows)
        assert sorted(position for micro_batch in share for position in micro_batch) == list(range(len(rows)))
        # No micro-batch is empty where the rows suffice, and the empty ones come last.
        filled = [bool(micro_batch) for micro_batch in share]
        assert filled == [number < len(rows) for number in range(plan.num_micro_batches)] or all(filled)
    assert plan.num_micro_batches % multiple_of == 0


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 80), st.data())
def test_a_batch_that_divides_has_a_plan_with_equal_shares(
    rows_each: int, dp_size: int, max_tokens: int, data: st.DataObject
) -> None:
    count = rows_each * dp_size
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    plan = plan_micro_batches(lengths, dp_size, max_tokens=max_tokens)
    assert [len(rows) for rows in plan.rows] == [rows_each] * dp_size


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_shares_differ_by_one_row_at_most(lengths: list[int], dp_size: int, max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, dp_size, max_tokens=max_tokens)
    sizes = [len(rows) for rows in plan.rows]
    assert max(sizes) - min(sizes) <= 1


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_rows_are_the_rows_of_each_micro_batch(lengths: list[int], dp_size: int, rows: int, multiple_of: int) -> None:
    plan = plan_micro_batches(lengths, dp_size, rows=rows, multiple_of=multiple_of)
    # As few as the largest share needs, in a multiple.
    largest = -(-len(lengths) // dp_size)
    needed = max(1, -(-largest // rows))
    assert plan.num_micro_batches == -(-needed // multiple_of) * multiple_of
    assert sorted(row for share in plan.rows for row in share) == list(range(len(lengths)))
    for share, own in zip(plan.shares, plan.rows, strict=True):
        sizes = [len(micro_batch) for micro_batch in share]
        assert [position for micro_batch in share for position in micro_batch] == list(range(len(own)))
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) <= rows
        if -(-len(own) // rows) == plan.num_micro_batches:
            assert all(size == rows for size in sizes[:-1])
        else:
            assert max(sizes) - min(sizes) <= 1


@given(LENGTHS, st.integers(1, 80))
def test_no_more_micro_batches_than_first_fit(lengths: list[int], max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, 1, max_tokens=max_tokens)
    # In first-fit packing all micro-batches but one are more than half full.
    used = sum(min(length, max_tokens) for length in lengths)
    assert plan.num_micro_batches <= 2 * used / max_tokens + 1


@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_the_same_input_gives_the_same_plan(lengths: list[int], dp_size: int, max_tokens: int) -> None:
    first = plan_micro_batches(lengths, dp_size, max_tokens=max_tokens)
    assert plan_micro_batches(tuple(lengths), dp_size, max_tokens=max_tokens) == first


def test_work_is_balanced_over_ranks_and_micro_batches() -> None:
    lengths = [1 + (7919 * i) % 500 for i in range(128)]  # 1..500, in no order
    plan = plan_micro_batches(lengths, 4, max_tokens=4000)
    sums = [[sum(tokens) for tokens in share] for share in tokens_of(plan, lengths)]
    shares = [sum(share) for share in sums]
    assert max(shares) <= 1.02 * min(shares)
    for share in sums:
        assert max(share) <= 1.05 * min(share)
    assert plan.num_micro_batches == -(-max(shares) // 4000)  # no more than the tokens need


@pytest.mark.parametrize(
    ("lengths", "dp_size", "settings", "shares"),
    [
        # 5 rows are 3 and 2: the 3 need two micro-batches of 2 rows, and the 2 rows make two as well.
        ([1] * 5, 2, {"rows": 2}, (((0, 1), (2,)), ((0,), (1,)))),
        # 3 rows on 2 ranks with 9 tokens each: the rank with one row has an empty micro-batch.
        ([9, 9, 9], 2, {"max_tokens": 9}, (((0,), (1,)), ((0,), ()))),
        ([9, 9, 9], 2, {"rows": 1}, (((0,), (1,)), ((0,), ()))),
        ([1, 2], 3, {"max_tokens": 4}, (((0,),), ((0,),), ((),))),
        ([], 2, {"max_tokens": 4}, (((),), ((),))),
        ([], 2, {"rows": 4, "multiple_of": 2}, (((), ()), ((), ()))),
        # 6 rows are 3 on each of 2 ranks: 3 micro-batches of 1 row, and a fourth to make a multiple of 2.
        ([1] * 6, 2, {"rows": 1, "multiple_of": 2}, (((0,), (1,), (2,), ()), ((0,), (1,), (2,), ()))),
        ([9] * 3, 1, {"max_tokens": 9, "multiple_of": 4}, (((0,), (1,), (2,), ()),)),
        ([0, 0], 1, {"max_tokens": 9, "multiple_of": 3}, (((0,), (1,), ()),)),
    ],
)
def test_ranks_without_enough_rows_have_empty_micro_batches(
    lengths: list[int], dp_size: int, settings: dict[str, int], shares: tuple[tuple[tuple[int, ...], ...], ...]
) -> None:
    assert plan_micro_batches(lengths, dp_size, **settings).shares == shares


def test_attention_makes_a_long_row_heavier_than_its_tokens() -> None:
    # 24576 tokens are 2 x 24576 units of work; as tokens, the long row and two of the others would balance.
    plan = plan_micro_batches([24576, *[8192] * 7], 2, rows=4)
    assert 0 in plan.rows[0]
    plan = plan_micro_batches([24576, *[8192] * 7], 1, max_tokens=49152)
    # Work: 24576 * 2 = 49152 against 8192 * 4/3 = 10923 each; alone with 3 others, 81920 tokens make two micro-batches.
    heavy = next(tokens for tokens in tokens_of(plan, [24576, *[8192] * 7])[0] if 24576 in tokens)
    assert heavy == [24576, 8192]


def test_the_heaviest_micro_batch_comes_first() -> None:
    plan = plan_micro_batches([2, 30, 4, 18], 1, max_tokens=30)
    assert tokens_of(plan, [2, 30, 4, 18]) == [[[30], [2, 4, 18]]]


def test_a_longer_row_stands_alone() -> None:
    plan = plan_micro_batches([3, 100, 4, 5], 1, max_tokens=12)
    assert tokens_of(plan, [3, 100, 4, 5]) == [[[100], [3, 4, 5]]]


def test_tight_packing_where_the_even_one_does_not_fit() -> None:
    # By even work the threes part: 3 2 2 | 3 2, and no third 2 fits into 6 beside 3 and 2. First-fit: 3 3 | 2 2 2.
    lengths = [3, 3, 2, 2, 2]
    plan = plan_micro_batches(lengths, 1, max_tokens=6)
    assert sorted(tokens_of(plan, lengths)[0]) == [[2, 2, 2], [3, 3]]


def test_a_packing_is_halved_to_more_micro_batches() -> None:
    def bin_of(*rows: int) -> _Bin:
        made = _Bin()
        for number in rows:
            made.add(_Row(number, tokens=10 * number))
        return made

    halved = _halve([bin_of(9), bin_of(1, 2), bin_of(3, 4, 5)], 5)
    assert sorted(part.numbers for part in halved) == [[1, 2], [3], [4], [5], [9]]
    halved = _halve([bin_of(9), bin_of(1, 2)], 5)
    assert sorted(part.numbers for part in halved) == [[], [], [1], [2], [9]]


@pytest.mark.parametrize(
    ("lengths", "dp_size", "settings", "message"),
    [
        ([1], 1, {}, "exactly one of max_tokens and rows .* None and None"),
        ([1], 1, {"max_tokens": 4, "rows": 2}, "exactly one of max_tokens and rows .* 4 and 2"),
        ([1], 1, {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ([1], 1, {"rows": 0}, "rows must be at least 1, got 0"),
        ([1], 0, {"rows": 1}, "dp_size must be at least 1, got 0"),
        ([1], 1, {"rows": 1, "multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        ([1, -1], 1, {"rows": 1}, "row 1 has length -1"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    lengths: list[int], dp_size: int, settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(lengths, dp_size, **settings)
