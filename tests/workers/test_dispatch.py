"""Dispatch rules over the ranks of small worlds; the expected ranks are written out by hand.

8 ranks, dp 2, pp 2, tp 2:

    order            rank   0    1    2    3    4    5    6    7
    tp-cp-ep-pp-dp   dp     0    0    0    0    1    1    1    1
                     pp     0    0    1    1    0    0    1    1
                     tp     0    1    0    1    0    1    0    1
    tp-cp-ep-dp-pp   dp     0    0    1    1    0    0    1    1
                     pp     0    0    0    0    1    1    1    1
                     tp     0    1    0    1    0    1    0    1
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config import Delivery
from roll.data.plan import plan_micro_batches
from roll.parallel.degrees import ParallelDegrees
from roll.protocol import ROW_DELIVERIES, DataProto, DataProtoFuture, LossNormalizers, MicroBatchPlan
from roll.workers.dispatch import Dispatch, Rule
from roll.workers.method import register
from roll.workers.routing import (
    RankArguments,
    Sent,
    check_can_stay,
    gather,
    reporting_ranks,
    route,
)

DP_LAST = ParallelDegrees(8, tp=2, pp=2, order="tp-cp-ep-pp-dp")
PP_LAST = ParallelDegrees(8, tp=2, pp=2)
SPLITTING = (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)
PLAN = MicroBatchPlan(shares=(((0,), (1, 2)), ((0,), (1,))), rows=((4, 0, 3), (2, 1)))


def batch(rows: int, plan: MicroBatchPlan | None = None) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, meta_info={"step": 7}).with_plan(plan)


def rows_by_rank(routed: list[RankArguments]) -> list[list[int] | None]:
    """The rows each rank got as its first argument; None for a stub."""
    firsts = [call.args[0] for call in routed]
    return [None if data.batch is None else data["x"].tolist() for data in firsts]


@pytest.mark.parametrize("dispatch", [Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO, Dispatch.STAGE_LEADERS])
def test_same_arguments_to_all(dispatch: Dispatch) -> None:
    data = batch(3)
    routed, sent = route(Rule(dispatch), PP_LAST, [data, 1], {"name": "a"})
    assert sent == Sent()
    assert len(routed) == 8
    assert all(call.args[0] is data and call.args[1] == 1 and call.kwargs == {"name": "a"} for call in routed)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (DP_LAST, [[0, 1], None, None, None, [2, 3], None, None, None]),
        (PP_LAST, [[0, 1], None, [2, 3], None, None, None, None, None]),
    ],
)
def test_dispatch_first_equal_chunks(degrees: ParallelDegrees, expected: list[list[int] | None]) -> None:
    routed, _ = route(Rule(Dispatch.DP_MP_DISPATCH_FIRST), degrees, [batch(4), "all"], {"extra": batch(2)})
    assert rows_by_rank(routed) == expected
    assert all(call.args[0].meta_info == {"step": 7} and call.args[1] == "all" for call in routed)
    sizes = [len(call.kwargs["extra"]) for call in routed]
    assert sizes == [0 if rows is None else 1 for rows in expected]


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (DP_LAST, [[0, 1], [0, 1], [0, 1], [0, 1], [2, 3], [2, 3], [2, 3], [2, 3]]),
        (PP_LAST, [[0, 1], [0, 1], [2, 3], [2, 3], [0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_compute_gives_the_share_to_the_whole_group(degrees: ParallelDegrees, expected: list[list[int]]) -> None:
    assert rows_by_rank(route(Rule(Dispatch.DP_MP_COMPUTE), degrees, [batch(4)], {})[0]) == expected
    # So does the other rule, where every rank takes its rows from the object store.
    first = Rule(Dispatch.DP_MP_DISPATCH_FIRST)
    assert rows_by_rank(route(first, degrees, [batch(4)], {}, delivery=ROW_DELIVERIES["object_store"])[0]) == expected


def test_planned_rows_go_where_the_plan_says() -> None:
    data = batch(5, PLAN).with_normalizers(LossNormalizers(tokens=50, sequences=5))
    routed, sent = route(Rule(Dispatch.DP_MP_DISPATCH_FIRST), DP_LAST, [data], {})
    assert sent == Sent(PLAN, num_rows=5)
    assert rows_by_rank(routed) == [[4, 0, 3], None, None, None, [2, 1], None, None, None]
    assert all(call.args[0].plan == PLAN for call in routed)
    assert all(call.args[0].normalizers == LossNormalizers(50, 5) for call in routed)
    assert data["x"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dispatch", SPLITTING)
def test_every_distinct_value_is_put_once(dispatch: Dispatch) -> None:
    placed: list[Any] = []

    def put(value: Any) -> int:
        placed.append(value)
        return len(placed) - 1

    routed, _ = route(Rule(dispatch), DP_LAST, [batch(4), "all"], {}, put=put)
    shares = [0, 0, 0, 0, 1, 1, 1, 1] if dispatch is Dispatch.DP_MP_COMPUTE else [0, 2, 2, 2, 1, 2, 2, 2]
    assert [call.args[0] for call in routed] == shares
    assert placed.count("all") == 1
    assert len(placed) == max(shares) + 2


@pytest.mark.parametrize(
    ("degrees", "dispatch", "expected"),
    [
        (DP_LAST, Dispatch.ONE_TO_ALL, (0, 1, 2, 3, 4, 5, 6, 7)),
        (DP_LAST, Dispatch.RANK_ZERO, (0,)),
        (DP_LAST, Dispatch.STAGE_LEADERS, (0, 2)),
        (PP_LAST, Dispatch.STAGE_LEADERS, (0, 4)),
        (DP_LAST, Dispatch.DP_MP_COMPUTE, (2, 6)),
        (DP_LAST, Dispatch.DP_MP_DISPATCH_FIRST, (2, 6)),
        (PP_LAST, Dispatch.DP_MP_DISPATCH_FIRST, (4, 6)),
        # dp 0 has the reporter of the higher number: data-parallel order is not rank order
        (ParallelDegrees(8, tp=2, pp=2, cp=2), Dispatch.DP_MP_DISPATCH_FIRST, (4,)),
    ],
)
def test_reporting_ranks(degrees: ParallelDegrees, dispatch: Dispatch, expected: tuple[int, ...]) -> None:
    assert reporting_ranks(Rule(dispatch), degrees) == expected


def results_of(rows: list[int]) -> DataProto:
    return DataProto.from_dict({"y": torch.tensor(rows) * 10})


def test_gather_without_batches() -> None:
    none, planned = Sent(), Sent(PLAN, num_rows=5)
    assert gather(Rule(Dispatch.RANK_ZERO), ["only"], none) == "only"
    for dispatch in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL, Dispatch.STAGE_LEADERS):
        assert gather(Rule(dispatch), ["first", "last"], none) == ["first", "last"]
    metrics = [{"loss": 1.0}, {"loss": 2.0}]
    assert gather(Rule(Dispatch.DP_MP_DISPATCH_FIRST), metrics, planned) == metrics
    assert gather(Rule(Dispatch.DP_MP_COMPUTE), [None, None], Sent(num_rows=3, padding=1)) == [None, None]


@pytest.mark.parametrize("dispatch", SPLITTING)
def test_gather_joins_batches_and_undoes_the_plan(dispatch: Dispatch) -> None:
    rule, planned = Rule(dispatch, returns_batch=True), Sent(PLAN, num_rows=5)
    halves = [results_of([0, 1]), results_of([2, 3])]
    assert gather(rule, halves, Sent(num_rows=4))["y"].tolist() == [0, 10, 20, 30]
    joined = gather(rule, [results_of([4, 0, 3]), results_of([2, 1])], planned)
    assert joined["y"].tolist() == [0, 10, 20, 30, 40]
    for wrong in (halves, [results_of([4, 0]), results_of([3, 2, 1])]):  # too few, and as many but not each its own
        with pytest.raises(ValueError, match="data-parallel group 0 returned 2 rows for its share of 3"):
            gather(rule, wrong, planned)


@given(st.lists(st.integers(0, 9), max_size=9), st.sampled_from(SPLITTING), st.sampled_from([1, 2, 4]), st.booleans())
def test_planned_rows_of_any_number_come_back_in_their_order(
    lengths: list[int], dispatch: Dispatch, tp: int, by_rows: bool
) -> None:
    degrees, rule = ParallelDegrees(8, tp=tp), Rule(dispatch, returns_batch=True)
    settings = {"rows": 2} if by_rows else {"max_tokens": 9}
    plan = plan_micro_batches(lengths, degrees.dp, **settings)
    names = [f"row {row}" for row in range(len(lengths))]
    data = DataProto.from_dict({"x": torch.arange(len(lengths))}, {"name": names}).with_plan(plan)
    routed, sent = route(rule, degrees, [data], {})
    shares = [routed[rank].args[0] for rank in degrees.leaders]
    assert [len(share) for share in shares] == [len(rows) for rows in plan.rows]
    results = [
        DataProto.from_dict({"y": 10 * share["x"]}, {"name": share.non_tensor_batch["name"]}) for share in shares
    ]
    joined = gather(rule, results, sent)
    assert joined["y"].tolist() == [10 * row for row in range(len(lengths))]
    assert list(joined.non_tensor_batch["name"]) == names


@pytest.mark.parametrize("dispatch", SPLITTING)
@pytest.mark.parametrize("rows", range(9))
def test_padding_goes_there_and_does_not_come_back(dispatch: Dispatch, rows: int) -> None:
    rule, four = Rule(dispatch, uneven="pad", returns_batch=True), ParallelDegrees(8, tp=2)
    routed, sent = route(rule, four, [batch(rows)], {})
    shares = [routed[rank].args[0] for rank in four.leaders]
    assert len({len(share) for share in shares}) == 1  # as many on each
    assert sum(len(share) for share in shares) - rows == sent.padding < 4
    there = [row for share in shares for row in share["x"].tolist()]
    assert there == [*range(rows), *[rows - 1] * sent.padding]
    back = gather(rule, [results_of(share["x"].tolist()) for share in shares], sent)
    assert back["y"].tolist() == [10 * row for row in range(rows)]


@pytest.mark.parametrize("dispatch", SPLITTING)
def test_the_registration_decides_what_a_call_gives(dispatch: Dispatch) -> None:
    shares = [results_of([0]), results_of([1])]
    assert gather(Rule(dispatch, returns_batch=True), shares, Sent(num_rows=2))["y"].tolist() == [0, 10]
    assert gather(Rule(dispatch), shares, Sent(num_rows=2)) == shares
    for wrong in ([{"loss": 1.0}, None], [results_of([0]), {"loss": 1.0}]):
        with pytest.raises(ValueError, match=r"with returns_batch=True must return a DataProto, got .*dict"):
            gather(Rule(dispatch, returns_batch=True), wrong, Sent(num_rows=2))


def test_padding_that_the_result_would_see_is_refused() -> None:
    rule, padded = Rule(Dispatch.DP_MP_COMPUTE, uneven="pad"), Sent(num_rows=3, padding=1)
    with pytest.raises(ValueError, match="a method with uneven='pad' must return a DataProto, got dict"):
        gather(rule, [{"loss": 1.0}, {"loss": 2.0}], padded)
    with pytest.raises(ValueError, match="must return a DataProto, got DataProto; register it with returns_batch=True"):
        gather(rule, [results_of([0, 1]), results_of([2, 2])], padded)
    joined = replace(rule, returns_batch=True)
    for wrong in ([results_of([0]), results_of([1])], [results_of([0]), results_of([1, 2, 2])]):
        with pytest.raises(ValueError, match="data-parallel group 0 returned 1 rows for its share of 2"):
            gather(joined, wrong, padded)
    with pytest.raises(ValueError, match="batches of 3, 5 rows cannot be padded alike"):
        route(rule, DP_LAST, [batch(3)], {"extra": batch(5)})
    with pytest.raises(ValueError, match="batches of 4, 5 rows cannot be padded alike"):
        route(rule, DP_LAST, [batch(4)], {"extra": batch(5)})


def test_all_to_all_gives_each_rank_its_own_entry() -> None:
    rule = Rule(Dispatch.ALL_TO_ALL)
    routed, sent = route(rule, ParallelDegrees(2), [["a", "b"], (1, None)], {"data": [batch(2), batch(5)]})
    assert [call.args for call in routed] == [("a", 1), ("b", None)]
    assert [len(call.kwargs["data"]) for call in routed] == [2, 5] and sent == Sent()
    with pytest.raises(ValueError, match="one entry for each of 2 ranks, got 3 entries"):
        route(rule, ParallelDegrees(2), [[1, 2, 3]], {})
    with pytest.raises(ValueError, match="one entry for each of 2 ranks, got DataProto"):
        route(rule, ParallelDegrees(2), [], {"data": batch(2)})


def test_only_the_fields_that_a_method_reads_are_sent() -> None:
    rule = Rule(Dispatch.DP_MP_DISPATCH_FIRST, fields=("text", "x"))
    data = DataProto.from_dict(
        {"x": torch.arange(4), "large": torch.zeros(4, 99)}, {"text": list("abcd"), "url": [0] * 4}
    )
    routed, _ = route(rule, DP_LAST, [data], {})
    share = routed[4].args[0]
    assert list(share.tensors) == ["x"] and share.non_tensor_batch["text"].tolist() == ["c", "d"]
    assert list(share.non_tensor_batch) == ["text"]
    with pytest.raises(ValueError, match="the batch lacks text; it has x"):
        route(rule, DP_LAST, [batch(4)], {})


def test_settings_of_a_rule_that_would_do_nothing_are_refused() -> None:
    for dispatch in set(Dispatch) - set(SPLITTING):
        with pytest.raises(ValueError, match=f"{dispatch.name} splits no batch"):
            register(dispatch, uneven="pad")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=f"{dispatch.name} splits no batch"):
            register(dispatch, fields=["x"])  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=f"{dispatch.name} splits no batch"):
            register(dispatch, returns_batch=True)  # type: ignore[call-overload]


def test_unknown_settings_are_refused() -> None:
    for make in (register, Rule):
        with pytest.raises(ValueError, match="uneven must be one of refuse, pad, got 'padd'"):
            make(Dispatch.DP_MP_COMPUTE, uneven="padd")  # type: ignore[arg-type, call-overload]
    with pytest.raises(ValueError, match="fields are given as a list, got 'xy'"):
        register(Dispatch.DP_MP_COMPUTE, fields="xy")


@pytest.mark.parametrize("dispatch", SPLITTING)
def test_what_cannot_be_split(dispatch: Dispatch) -> None:
    with pytest.raises(ValueError, match="a batch of 5 rows does not divide among dp 2 groups"):
        route(Rule(dispatch), DP_LAST, [batch(5)], {})
    with pytest.raises(ValueError, match="the micro-batch plan is for dp 2, the cluster has dp 4"):
        route(Rule(dispatch), ParallelDegrees(8, tp=2), [batch(5, PLAN)], {})
    with pytest.raises(ValueError, match="the micro-batch plan has 5 rows, the batch has 3"):
        route(Rule(dispatch), DP_LAST, [batch(3, PLAN)], {})
    with pytest.raises(ValueError, match="must share one micro-batch plan"):
        route(Rule(dispatch), DP_LAST, [batch(5, PLAN), batch(4)], {})
    with pytest.raises(ValueError, match="needs a DataProto argument, and got none"):
        route(Rule(dispatch), DP_LAST, [1], {"rows": [1, 2]})


@dataclass(frozen=True)
class Elsewhere:
    """A reference that nobody follows."""

    number: int

    def future(self) -> Any:
        raise AssertionError("fetched")


@pytest.mark.parametrize("dispatch", SPLITTING)
def test_remote_rows_are_cut_without_being_fetched(dispatch: Dispatch) -> None:
    heads = [batch(0).update({"text": []}), batch(0).update({"text": []})]
    for number, head in enumerate(heads):
        head.meta_info["metrics"] = {"part": [number]}
    rows = DataProtoFuture.concat([Elsewhere(0), Elsewhere(1)], sizes=[1, 3], heads=heads)
    routed, sent = route(Rule(dispatch), DP_LAST, [rows], {})
    assert sent == Sent(None, 4, 0)
    shares = [rank.args[0] for rank in routed]
    first, second = rows.chunk(2)
    if dispatch is Dispatch.DP_MP_COMPUTE:
        assert shares == [first] * 4 + [second] * 4
    else:
        assert [shares[0], shares[4]] == [first, second]
        stubs = [stub for rank, stub in enumerate(shares) if rank not in (0, 4)]
        assert all(stub.batch is None and not stub.non_tensor_batch for stub in stubs)
        assert all(stub.meta_info == {"step": 7, "metrics": {"part": [0, 1]}} for stub in stubs)
    read = route(Rule(dispatch, fields=("x",)), DP_LAST, [rows], {})[0][4].args[0]
    assert read.fields == ("x",) and read.num_rows == 2
    with pytest.raises(ValueError, match="the batch lacks y; it has text, x"):
        route(Rule(dispatch, fields=("y",)), DP_LAST, [rows], {})


def test_remote_rows_of_unknown_meta_info_go_where_there_are_no_stubs() -> None:
    rows = DataProtoFuture.concat([Elsewhere(0), Elsewhere(1)], sizes=[1, 3])
    placed: list[Any] = []
    with pytest.raises(ValueError, match="known without its rows only if it is made with heads"):
        route(Rule(Dispatch.DP_MP_DISPATCH_FIRST), DP_LAST, [rows], {}, put=placed.append)
    assert placed == []
    for rule, degrees in (
        (Rule(Dispatch.DP_MP_COMPUTE), DP_LAST),
        (Rule(Dispatch.DP_MP_DISPATCH_FIRST), ParallelDegrees(2)),
    ):
        assert route(rule, degrees, [rows], {})[0][-1].args[0] == rows.chunk(2)[1]


@pytest.mark.parametrize("dispatch", SPLITTING)
def test_remote_rows_that_cannot_be_split(dispatch: Dispatch) -> None:
    with pytest.raises(ValueError, match="make it with sizes"):
        route(Rule(dispatch), DP_LAST, [DataProtoFuture.concat([Elsewhere(0)])], {})
    five = DataProtoFuture.concat([Elsewhere(0)], sizes=[5])
    for rule in (Rule(dispatch), Rule(dispatch, uneven="pad")):
        with pytest.raises(ValueError, match="remote rows are not filled up: 5 do not divide among dp 2"):
            route(rule, DP_LAST, [five], {})
    with pytest.raises(ValueError, match="and remote ones have none"):
        route(Rule(dispatch), DP_LAST, [batch(5, PLAN), DataProtoFuture.concat([Elsewhere(0)], sizes=[4])], {})


def test_what_cannot_stay_with_the_workers() -> None:
    rule = Rule(Dispatch.DP_MP_COMPUTE, uneven="pad", returns_batch=True)
    check_can_stay("score", rule, DP_LAST, [batch(4)])
    for other in (Rule(Dispatch.ONE_TO_ALL), Rule(Dispatch.DP_MP_COMPUTE)):
        with pytest.raises(ValueError, match="train is not registered with returns_batch=True"):
            check_can_stay("train", other, DP_LAST, [batch(4)])
    with pytest.raises(ValueError, match="with rows that only fill it up"):
        check_can_stay("score", rule, DP_LAST, [batch(3)])
    with pytest.raises(ValueError, match="with a micro-batch plan"):
        check_can_stay("score", rule, DP_LAST, [batch(5, PLAN)])


def test_every_setting_of_the_delivery_is_a_way() -> None:
    assert set(ROW_DELIVERIES) == set(get_args(Delivery))
    assert [way.receivers([4, 5, 6]) for way in ROW_DELIVERIES.values()] == [[4, 5, 6], [4]]


def test_rules_need_no_ray() -> None:
    check = "import sys, roll.workers.dispatch, roll.workers.routing; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_prompts_need_not_divide_over_the_rollout_ranks() -> None:
    """4 prompts on 3 ranks: shares of 2 rows, of which copies of the last prompt fill up the third."""
    from roll.workers.rollout import RolloutWorker

    rule = RolloutWorker.generate.rule
    routed, sent = route(rule, ParallelDegrees(3), [batch(4)], {"seed": 1})
    assert rows_by_rank(routed) == [[0, 1], [2, 3], [3, 3]]
    assert gather(rule, [call.args[0] for call in routed], sent)["x"].tolist() == [0, 1, 2, 3]
