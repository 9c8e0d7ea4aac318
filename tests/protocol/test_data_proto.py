"""DataProto: every operation against lists of rows, what it refuses, and that nothing of the caller changes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from roll.protocol import DataProto, LossNormalizers, MicroBatchPlan

ROWS = st.integers(0, 7)
PLAN = MicroBatchPlan(rows=((0, 2), (1, 3)), shares=(((0,), (1,)), ((1,), (0,))))
NORMALIZERS = LossNormalizers(tokens=9, sequences=4)


def batch_of(count: int, **fields: Any) -> DataProto:
    """Rows whose tensors and objects all tell the row number."""
    numbers = torch.arange(count)
    tensors = {"ids": numbers.unsqueeze(1) * 10 + torch.arange(3), "score": numbers.float()}
    data = DataProto.from_dict(tensors, {"name": [f"row {i}" for i in range(count)]}, {"step": 3, "tags": ["a"]})
    return dataclasses.replace(data, **fields)


def rows_of(data: DataProto) -> list[int]:
    """The row numbers, read from every field."""
    numbers = data["score"].int().tolist()
    assert data["ids"].tolist() == [[10 * i, 10 * i + 1, 10 * i + 2] for i in numbers]
    assert list(data["name"]) == [f"row {i}" for i in numbers]
    assert data.meta_info == {"step": 3, "tags": ["a"]}
    assert len(data) == len(numbers)
    return numbers


# --- making one -------------------------------------------------------------------------------------------------------


def test_fields_by_name() -> None:
    data = batch_of(2)
    assert len(data) == 2
    assert data.batch is not None and data.batch.batch_size == torch.Size([2])
    assert data["score"].tolist() == [0.0, 1.0]
    assert data["name"].dtype == object
    with pytest.raises(KeyError, match="no field idz; there are ids, name, score"):
        data["idz"]


def test_equal_lists_stay_one_object_for_each_row() -> None:
    data = DataProto.from_dict({}, {"calls": [[1, 2], [3, 4]], "arrays": np.ones((2, 3))})
    assert data["calls"].shape == data["arrays"].shape == (2,)
    assert data["calls"][1] == [3, 4]
    assert data["arrays"][0].tolist() == [1.0, 1.0, 1.0]


def test_an_empty_batch_is_legal() -> None:
    data = batch_of(0)
    assert len(data) == 0
    assert rows_of(DataProto.concat(data.chunk(3))) == []
    assert rows_of(data.repeat(2)) == []
    assert list(data.make_iterator(4, epochs=2)) == []
    assert len(DataProto()) == len(DataProto.from_dict({})) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": torch.zeros(2), "b": torch.zeros(3)},), "same number of rows, got {'a': 2, 'b': 3}"),
        (({"a": torch.zeros(2)}, {"b": [1]}), "same number of rows, got {'a': 2, 'b': 1}"),
        (({"a": torch.tensor(1.0)},), r"a must be a tensor \[B, ...\], got float32\[\]"),
        (({"a": [1, 2]},), r"a must be a tensor \[B, ...\], got list"),
        (({"a": torch.zeros(2)}, {"b": "xy"}), "b must be a list or an array .* got 'xy'"),
        (({"a": torch.zeros(2)}, {"a": [1, 2]}), "a: given both as tensor and as non-tensor field"),
    ],
)
def test_what_is_no_batch_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(*arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]), r"one batch dimension \[B\], got \[2, 3\]"),
        (TensorDict({"a": TensorDict({}, batch_size=[2])}, batch_size=[2]), "a must be a tensor .* got TensorDict"),
    ],
)
def test_a_tensordict_of_another_kind_is_refused(batch: TensorDict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto(batch)


def test_fields_cannot_be_assigned() -> None:
    data = batch_of(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.meta_info = {}  # type: ignore[misc]


def test_a_plan_for_other_rows_is_refused() -> None:
    assert batch_of(4).with_plan(PLAN).plan is PLAN
    assert batch_of(2).with_plan(PLAN).plan is PLAN  # a share
    with pytest.raises(ValueError, match=r"plan of 4 rows, shares \[2, 2\], on a batch of 3 rows"):
        batch_of(3).with_plan(PLAN)


def test_nothing_of_the_caller_is_shared() -> None:
    tags = ["a"]
    meta = {"tags": tags}
    tensors = {"a": torch.zeros(2)}
    data = DataProto.from_dict(tensors, meta_info=meta)
    parts = [data, data[:1], data.select(), data.to("cpu"), data.stub(), data.chunk(2)[0], data.with_plan(None)]
    for part in parts:
        part.meta_info["tags"].append("b")
        part.meta_info["new"] = 1
    assert meta == {"tags": ["a"]}
    assert [part.meta_info["tags"] for part in parts] == [["a", "b"]] * len(parts)
    assert data.batch is not None
    batch = DataProto(data.batch).batch
    assert batch is not None
    batch["c"] = torch.ones(2)
    assert "c" not in data.batch.keys()  # noqa: SIM118 - a TensorDict iterates over its rows
    assert list(tensors) == ["a"]


def test_repr_names_fields_dtypes_and_shapes() -> None:
    data = batch_of(4, plan=PLAN, normalizers=NORMALIZERS)
    assert repr(data) == (
        "DataProto(4 rows, 112 B, batch={ids: int64[4, 3], score: float32[4]}, non_tensor_batch={name: object[4]}, "
        "meta_info={'step': 3, 'tags': ['a']}, plan=2 x 2 micro-batches, "
        "normalizers=LossNormalizers(tokens=9, sequences=4))"
    )
    assert repr(DataProto()) == "DataProto(0 rows, batch=None)"


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (1, [1]),
        (-1, [3]),
        (np.int64(2), [2]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(-2, None), [2, 3]),
        (slice(3, 1), []),
        ([3, 0, -1], [3, 0, 3]),
        ((2, 1), [2, 1]),
        ([], []),
        (np.array([1, -4]), [1, 0]),
        (torch.tensor([2, 2]), [2, 2]),
        (torch.tensor([1], dtype=torch.int32), [1]),
        ([True, False, False, True], [0, 3]),
        (np.array([False, True, True, False]), [1, 2]),
        (torch.tensor([False] * 4), []),
        (torch.empty(0, dtype=torch.int64), []),
    ],
)
def test_rows_by_any_index(index: Any, rows: list[int]) -> None:
    data = batch_of(4)
    assert rows_of(data[index]) == rows
    if not isinstance(index, int | np.integer | slice):
        assert rows_of(data.select_idxs(index)) == rows


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "row 4 is outside a batch of 4 rows"),
        (-5, IndexError, "row -5 is outside"),
        ([0, 7], IndexError, "row 7 is outside"),
        ([True, False], ValueError, "mask of 2 rows for a batch of 4 rows"),
        (torch.zeros(1, 1, dtype=torch.int64), ValueError, r"one-dimensional, got shape \[1, 1\]"),
        ([0.5], TypeError, "must be integers"),
        (True, TypeError, "not as bool"),
        (None, TypeError, "not as NoneType"),
    ],
)
def test_what_names_no_row_is_refused(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_of(4)[index]


def test_iteration_yields_one_row_at_a_time() -> None:
    assert [rows_of(row) for row in batch_of(3)] == [[0], [1], [2]]


@given(ROWS, st.integers(1, 9))
def test_chunk_has_the_sizes_of_array_split_and_concat_undoes_it(count: int, chunks: int) -> None:
    data = batch_of(count)
    pieces = data.chunk(chunks)
    assert [rows_of(piece) for piece in pieces] == [piece.tolist() for piece in np.array_split(range(count), chunks)]
    assert rows_of(DataProto.concat(pieces)) == list(range(count))


@given(ROWS, st.integers(1, 9))
def test_split_has_pieces_of_one_size_and_concat_undoes_it(count: int, size: int) -> None:
    pieces = batch_of(count).split(size)
    expected = [list(range(count))[begin : begin + size] for begin in range(0, count, size)] or [[]]
    assert [rows_of(piece) for piece in pieces] == expected
    assert rows_of(DataProto.concat(pieces)) == list(range(count))


def test_pieces_of_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 chunk, got 0"):
        batch_of(2).chunk(0)
    with pytest.raises(ValueError, match="at least 1 row, got 0"):
        batch_of(2).split(0)


@given(ROWS, st.integers(0, 3))
def test_repeat(count: int, times: int) -> None:
    data = batch_of(count)
    assert rows_of(data.repeat(times)) == [row for row in range(count) for _ in range(times)]
    assert rows_of(data.repeat(times, interleave=False)) == list(range(count)) * times


def other_pieces() -> list[tuple[DataProto, str]]:
    tensors = {"ids": torch.zeros(1, 3, dtype=torch.int64), "score": torch.zeros(1)}
    names = {"name": ["row 0"]}
    meta = {"step": 3, "tags": ["a"]}
    return [
        (DataProto.from_dict(tensors, names, meta | {"step": 4}), "meta_info step is 3 in piece 0, 4 in piece 1"),
        (DataProto.from_dict(tensors, names, {"step": 3}), "tags is not in both piece 0 and piece 1"),
        (DataProto.from_dict({"ids": tensors["ids"]}, names, meta), "score is not in both"),
        (DataProto.from_dict(tensors, {}, meta), "name is not in both"),
        (DataProto.from_dict(tensors | {"score": torch.zeros(1).double()}, names, meta), "float32.*, float64"),
        (
            DataProto.from_dict(tensors | {"ids": torch.zeros(1, 4).long()}, names, meta),
            r"int64\[2, 3\] in piece 0, int64\[1, 4\] in piece 1",
        ),
        (DataProto(None, {"name": np.array(["row 0"])}, meta), "one has no batch"),
    ]


@pytest.mark.parametrize(("piece", "message"), other_pieces())
def test_pieces_that_differ_are_not_joined(piece: DataProto, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.concat([batch_of(2), piece])


def test_concat_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one piece"):
        DataProto.concat([])


def test_mini_batches_hold_every_row_once_in_each_epoch() -> None:
    data = batch_of(6)
    assert [rows_of(piece) for piece in data.make_iterator(2)] == [[0, 1], [2, 3], [4, 5]]
    state = torch.get_rng_state()
    drawn = [rows_of(piece) for piece in data.make_iterator(3, epochs=2, seed=5)]
    assert torch.equal(torch.get_rng_state(), state)
    epochs = [drawn[0] + drawn[1], drawn[2] + drawn[3]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 2
    assert epochs[0] != epochs[1] and epochs[0] != list(range(6))
    assert drawn == [rows_of(piece) for piece in data.make_iterator(3, epochs=2, seed=5)]
    assert drawn != [rows_of(piece) for piece in data.make_iterator(3, epochs=2, seed=6)]
    with pytest.raises(ValueError, match="6 rows are not a multiple of mini_batch_size 4"):
        data.make_iterator(4)


# --- fields -----------------------------------------------------------------------------------------------------------


def test_select_and_pop() -> None:
    data = batch_of(2)
    only_ids = data.select(["ids"], [])
    assert list(only_ids.tensors) == ["ids"] and not only_ids.non_tensor_batch
    assert rows_of(data.select()) == [0, 1]
    assert len(data.select([], [])) == 2  # no field is left, the rows are
    popped, rest = data.pop(["ids"], ["name"])
    assert (list(popped.tensors), list(popped.non_tensor_batch)) == (["ids"], ["name"])
    assert (list(rest.tensors), list(rest.non_tensor_batch)) == (["score"], [])
    assert rows_of(data) == rows_of(popped.union(rest)) == [0, 1]
    for select in (data.select, data.pop):
        with pytest.raises(KeyError, match="no field name; there are ids, score"):
            select(["name"])
        with pytest.raises(KeyError, match="no field ids; there are name"):
            select([], ["ids"])


def test_union_joins_fields_meta_data_plan_and_normalizers() -> None:
    nan = torch.tensor([float("nan")] * 4)
    first = batch_of(4, plan=PLAN).union(DataProto.from_dict({"nan": nan}, {"list": [[1]] * 4}))
    second = DataProto.from_dict({"nan": nan.clone()}, {"list": [[1]] * 4}, {"more": 1.5, "step": 3})
    both = first.union(second.with_normalizers(NORMALIZERS))
    assert list(both.tensors) == ["ids", "score", "nan"]
    assert both.meta_info == {"step": 3, "tags": ["a"], "more": 1.5}
    assert both.plan == PLAN and both.normalizers == NORMALIZERS
    assert "nan" not in batch_of(4).tensors


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto.from_dict({"score": torch.tensor([0.0, 1.5])}), "batch has different values of score"),
        (DataProto.from_dict({"score": torch.tensor([0, 1])}), "batch has different values of score"),
        (DataProto.from_dict({"score": torch.zeros(2, 1)}), "batch has different values of score"),
        (DataProto.from_dict({"x": torch.zeros(2)}, {"name": ["row 0", "row 2"]}), "different values of name"),
        (DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"tags": ["b"]}), "meta_info has different .* tags"),
        (DataProto.from_dict({"x": torch.zeros(3)}), "union of 2 and 3 rows"),
        (DataProto.from_dict({"name": torch.zeros(2)}), "name: given both as tensor and as non-tensor"),
    ],
)
def test_union_refuses_what_differs(other: DataProto, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of(2).union(other)


def test_union_of_two_plans_is_refused() -> None:
    other = MicroBatchPlan(rows=((0, 1), (2, 3)), shares=PLAN.shares)
    with pytest.raises(ValueError, match="union: plan is"):
        batch_of(4, plan=PLAN).union(batch_of(4, plan=other))


# --- plan, normalizers, copies ----------------------------------------------------------------------------------------


def test_plan_and_normalizers_stay_with_the_rows_and_leave_with_them() -> None:
    data = batch_of(4, plan=PLAN, normalizers=NORMALIZERS)
    for same in (data.select(["ids"]), data.pop()[1], data.to("cpu"), data.clone(), data.stub()):
        assert (same.plan, same.normalizers) == (PLAN, NORMALIZERS)
    changed = [data[:2], data.chunk(2)[0], data.split(2)[0], DataProto.concat([data]), data.repeat(1)]
    for other in [*changed, data.select_idxs([1, 0, 2, 3]), next(data.make_iterator(4))]:
        assert other.plan is None and other.normalizers is None


def test_a_stub_has_only_what_holds_for_all_rows() -> None:
    stub = batch_of(4, plan=PLAN).stub()
    assert stub.batch is None and not stub.non_tensor_batch and len(stub) == 0
    assert stub.meta_info == {"step": 3, "tags": ["a"]}
    assert pickle.loads(pickle.dumps(stub)).batch is None


def test_a_clone_shares_nothing() -> None:
    data = batch_of(2)
    copy = data.clone()
    copy["ids"].fill_(-1)
    copy["name"][0] = "other"
    copy.meta_info["tags"].append("b")
    assert rows_of(data) == [0, 1]


def test_a_pickle_brings_everything_back() -> None:
    data = batch_of(4, plan=PLAN, normalizers=NORMALIZERS)
    back = pickle.loads(pickle.dumps(data))
    assert rows_of(back) == [0, 1, 2, 3]
    assert (back.plan, back.normalizers) == (PLAN, NORMALIZERS)
    assert len(pickle.loads(pickle.dumps(data.select([], [])))) == 4


def test_a_slice_is_pickled_without_the_rows_it_leaves_out() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1000, 100), "t": torch.arange(12).view(4, 3).T.repeat(334, 1)[:1000]})
    part = data[10:12]
    pickled = pickle.dumps(part)
    assert len(pickled) < 10_000  # the whole is 400 kB
    assert pickle.loads(pickled)["t"].tolist() == part["t"].tolist()
