"""MicroBatchPlan: what it refuses, and the way back to the order of the rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.data.plan import plan_micro_batches
from roll.protocol import DataProto, MicroBatchPlan

PLAN = MicroBatchPlan(rows=((0, 3, 4), (1, 2)), shares=(((0, 1), (2,)), ((1,), (0,))))


def test_the_example_of_the_docstring() -> None:
    assert (PLAN.dp_size, PLAN.num_rows, PLAN.num_micro_batches) == (2, 5, 2)
    assert PLAN.restore_order == (0, 3, 4, 1, 2)
    assert PLAN.restore(torch.tensor([0, 3, 4, 1, 2])).tolist() == [0, 1, 2, 3, 4]
    assert PLAN.restore(np.array([0, 3, 4, 1, 2])).tolist() == [0, 1, 2, 3, 4]
    results = DataProto.from_dict({"row": torch.tensor([[0], [3], [4], [1], [2]])}, {"name": list("adebc")})
    assert PLAN.restore(results)["row"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert list(PLAN.restore(results)["name"]) == list("abcde")


def test_results_of_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="4 rows of results for a plan of 5 rows"):
        PLAN.restore(torch.zeros(4))


def test_a_plan_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert hash(PLAN) == hash(MicroBatchPlan(shares=PLAN.shares, rows=PLAN.rows))


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 6))
def test_restore_undoes_the_dealing_of_any_plan(lengths: list[int], dp_size: int) -> None:
    plan = plan_micro_batches(lengths, dp_size, max_tokens=40)
    batch = torch.tensor(lengths, dtype=torch.long) * 100 + torch.arange(len(lengths))
    returned = torch.cat([batch[list(rows)] for rows in plan.rows])
    assert torch.equal(plan.restore(returned), batch)


@pytest.mark.parametrize(
    ("rows", "shares", "message"),
    [
        (((0, 1), (1, 2)), (((0, 1),), ((0, 1),)), r"the batch must hold each of its rows 0..3 exactly once"),
        (((0, 2),), (((0, 1),),), r"the batch must hold each of its rows 0..1 exactly once, got \[0, 2\]"),
        (((0, 1),), (((0,),),), r"the share of data-parallel rank 0 must hold each of its rows 0..1 exactly once"),
        (((0, 1),), (((0, 0), (1,)),), "rank 0 must hold each of its rows"),
        (((0, 1), (2, 3)), (((0, 1),), ((0,), (1,))), "rank 1 has 2 micro-batches, rank 0 has 1"),
        (((0,), (1,)), (((0,),),), "rows for 2 and shares for 1 data-parallel ranks"),
        ((), (), "rows for 0 and shares for 0"),
        (((),), ((),), "at least one micro-batch"),
        (((0,), ()), (((0,), ()), ((),)), "rank 1 has 1 micro-batches, rank 0 has 2"),
    ],
)
def test_what_is_no_plan_is_refused(
    rows: tuple[tuple[int, ...], ...], shares: tuple[tuple[tuple[int, ...], ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MicroBatchPlan(rows=rows, shares=shares)
