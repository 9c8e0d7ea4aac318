"""A batch cut into micro-batches and its results joined again: every row where it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config import MicroBatchSettings
from roll.data.micro_batches import check_dealt, cut_micro_batches, join_results, with_plan
from roll.protocol import DataProto, MicroBatchPlan


def batch_of(lengths: list[int]) -> DataProto:
    """Rows of these lengths, padded on the right; row r holds the id r + 1."""
    width = max([1, *lengths])
    mask = torch.tensor([[int(column < length) for column in range(width)] for length in lengths]).view(-1, width)
    ids = mask * torch.arange(1, len(lengths) + 1).unsqueeze(1)
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "row": torch.arange(len(lengths))},
        {"name": [f"row {row}" for row in range(len(lengths))]},
        {"step": 3},
    )


def shares_of(batch: DataProto) -> list[DataProto]:
    """What each data-parallel rank is sent: its rows, and the plan of the whole batch."""
    assert batch.plan is not None
    return [batch.select_idxs(list(rows)).with_plan(batch.plan) for rows in batch.plan.rows]


def row_numbers(micro_batches: list[DataProto]) -> list[list[int]]:
    return [micro_batch["row"].tolist() for micro_batch in micro_batches]


def per_row(micro_batch: DataProto) -> dict[str, torch.Tensor]:
    """Results that tell the rows apart: one number, and one number per column."""
    ids = micro_batch["input_ids"]
    return {"row": 10 * micro_batch["row"], "columns": ids[:, None, :] * torch.ones(1, 2, 1)}


def test_a_plan_decides() -> None:
    # The documented example of MicroBatchPlan: rank 0 holds rows 0 3 4 and takes 0 3, then 4; rank 1 takes 2, then 1.
    plan = MicroBatchPlan(rows=((0, 3, 4), (1, 2)), shares=(((0, 1), (2,)), ((1,), (0,))))
    first, second = shares_of(batch_of([1, 2, 3, 4, 5]).with_plan(plan))
    settings = MicroBatchSettings(rows=1)  # other micro-batches than the plan's, and not heard
    micro_batches, order = cut_micro_batches(first, settings, 0)
    assert (row_numbers(micro_batches), order) == ([[0, 3], [4]], [0, 1, 2])
    micro_batches, order = cut_micro_batches(second, settings, 1)
    assert (row_numbers(micro_batches), order) == ([[2], [1]], [1, 0])
    assert micro_batches[0]["name"].tolist() == ["row 2"]
    assert micro_batches[0].meta_info == {"step": 3}


def test_without_a_plan_the_share_is_planned_by_itself() -> None:
    # By hand, a budget of 6 tokens for lengths 2 5 4 1: 5 + 1 and 4 + 2 fit exactly, so there are two micro-batches.
    micro_batches, order = cut_micro_batches(batch_of([2, 5, 4, 1]), MicroBatchSettings(max_tokens=6), 0)
    assert sorted(row_numbers(micro_batches)) == [[0, 2], [1, 3]]
    assert order == [row for rows in row_numbers(micro_batches) for row in rows]
    by_rows, order = cut_micro_batches(batch_of([2, 5, 4, 1, 3]), MicroBatchSettings(rows=2), 3)
    assert (row_numbers(by_rows), order) == ([[0, 1], [2, 3], [4]], [0, 1, 2, 3, 4])


def test_meta_info_decides_where_no_plan_came() -> None:
    batch = batch_of([2, 5, 4, 1, 3])
    sized = DataProto(batch.batch, meta_info={"micro_batch_size": 2})
    micro_batches, order = cut_micro_batches(sized, MicroBatchSettings(max_tokens=6), 0)
    assert (row_numbers(micro_batches), order) == ([[0, 1], [2, 3], [4]], [0, 1, 2, 3, 4])
    planned = sized.with_plan(MicroBatchPlan(rows=((0, 1, 2, 3, 4),), shares=(((4, 3, 2), (1, 0)),)))
    assert row_numbers(cut_micro_batches(planned, MicroBatchSettings(max_tokens=6), 0)[0]) == [[4, 3, 2], [1, 0]]
    for wrong in (0, -1, 2.0, True, "2"):
        with pytest.raises(ValueError, match="meta_info micro_batch_size must be an integer of at least 1, got"):
            DataProto(batch.batch, meta_info={"micro_batch_size": wrong})


def test_lengths_are_the_real_tokens() -> None:
    # 3 + 3 real tokens fit a budget of 6, though the rows are padded to 8.
    batch = batch_of([3, 3, 8])
    micro_batches, _ = cut_micro_batches(batch, MicroBatchSettings(max_tokens=6), 0)
    assert sorted(row_numbers(micro_batches)) == [[0, 1], [2]]


def test_with_plan_deals_to_every_rank_and_changes_nothing_else() -> None:
    batch = batch_of([2, 5, 4, 1])
    planned = with_plan(batch, 2, MicroBatchSettings(rows=1))
    assert batch.plan is None
    assert planned.plan is not None
    # Longest first, to the rank with the least work: 5 | 4, then 2 to the second rank and 1 to the first.
    assert planned.plan.rows == ((1, 3), (0, 2))
    assert planned.plan.shares == (((0,), (1,)), ((0,), (1,)))
    assert torch.equal(planned["input_ids"], batch["input_ids"])
    assert planned.meta_info == {"step": 3}


def test_results_are_joined_in_the_order_of_the_rows() -> None:
    # Rows 2 0 and 1 were computed in this order; each result is ten times its row.
    results: list[dict[str, Any]] = [{"x": torch.tensor([20, 0])}, {"x": torch.tensor([10])}]
    assert join_results(results, [2, 0, 1])["x"].tolist() == [0, 10, 20]
    # An order that is not its own inverse, so that the two cannot be confused: rows 1 2 0.
    assert join_results([{"x": torch.tensor([10, 20, 0])}], [1, 2, 0])["x"].tolist() == [0, 10, 20]


def test_joined_results_keep_shape_and_dtype() -> None:
    results = [{"flag": torch.tensor([[True, False]])}, {"flag": torch.tensor([[False, True]])}]
    joined = join_results(results, [1, 0])["flag"]
    assert joined.tolist() == [[False, True], [True, False]]
    assert joined.dtype == torch.bool


@st.composite
def settings(draw: st.DrawFn) -> MicroBatchSettings:
    if draw(st.booleans()):
        return MicroBatchSettings(rows=draw(st.integers(1, 4)))
    return MicroBatchSettings(max_tokens=draw(st.integers(6, 20)))


@given(st.lists(st.integers(0, 6), max_size=12), settings())
def test_cut_and_join_without_a_plan(lengths: list[int], settings: MicroBatchSettings) -> None:
    batch = batch_of(lengths)
    micro_batches, order = cut_micro_batches(batch, settings, 0)
    assert sorted(order) == list(range(len(lengths)))
    for micro_batch in micro_batches:
        assert int(micro_batch["attention_mask"].sum()) <= (settings.max_tokens or 24)
        assert len(micro_batch) <= (settings.rows or 12)
    joined = join_results([per_row(micro_batch) for micro_batch in micro_batches], order)
    for name, expected in per_row(batch).items():
        assert torch.equal(joined[name], expected)


@given(st.lists(st.integers(0, 6), max_size=9), st.integers(1, 5), settings())
def test_shares_come_back_in_the_rows_of_the_batch(lengths: list[int], dp: int, settings: MicroBatchSettings) -> None:
    batch = with_plan(batch_of(lengths), dp, settings)
    assert batch.plan is not None
    collected = []
    for rank, share in enumerate(shares_of(batch)):
        micro_batches, order = cut_micro_batches(share, settings, rank)
        assert len(micro_batches) == batch.plan.num_micro_batches
        collected.append(join_results([per_row(micro_batch) for micro_batch in micro_batches], order))
    for name, expected in per_row(batch).items():
        assert torch.equal(batch.plan.restore(torch.cat([results[name] for results in collected])), expected)


def test_a_whole_batch_that_was_not_dealt_is_refused() -> None:
    planned = with_plan(batch_of([2, 5, 4, 1]), 2, MicroBatchSettings(rows=1))
    with pytest.raises(ValueError, match="the plan deals 2 of 4 rows to data-parallel rank 0, its batch has 4"):
        cut_micro_batches(planned, MicroBatchSettings(rows=1), 0)
    with pytest.raises(ValueError, match="the plan deals to 2 data-parallel ranks, this is rank 0 of 4"):
        check_dealt(planned[:2].with_plan(planned.plan), 0, 4)


def test_a_share_without_rows_is_one_micro_batch_without_rows() -> None:
    micro_batches, order = cut_micro_batches(batch_of([3])[:0], MicroBatchSettings(rows=1), 0)
    assert (row_numbers(micro_batches), order) == ([[]], [])
    assert join_results([per_row(part) for part in micro_batches], order)["columns"].shape == (0, 2, 3)
