"""DataProto: fields, rows and names one by one, and what each method refuses; the laws are in test_data_proto_laws."""

from __future__ import annotations

import dataclasses
import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from roll.protocol import DataProto, MicroBatchPlan
from tests.protocol.batches import NORMALIZERS, PLAN, batch_of, rows_of

# --- making one -------------------------------------------------------------------------------------------------------


def test_fields_by_name() -> None:
    data = batch_of(2)
    assert len(data) == 2
    assert data.batch is not None and data.batch.batch_size == torch.Size([2])
    assert data["score"].tolist() == [0.0, 1.0]
    assert data["name"].dtype == object
    with pytest.raises(KeyError, match="the batch lacks idz; it has ids, name, score"):
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


def test_the_documented_constructor() -> None:
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3)
    fields = {"input_ids": ids}
    data = DataProto(batch=fields, non_tensor_batch={"answer": ["4", "7"]}, meta_info={"global_step": 100})
    fields["attention_mask"] = mask  # the caller's dict stays the caller's
    assert (len(data), list(data.tensors), data.meta_info) == (2, ["input_ids"], {"global_step": 100})
    assert data["input_ids"] is ids and data["answer"].tolist() == ["4", "7"]
    assert len(DataProto(batch={}, non_tensor_batch={"answer": [1, 2, 3]})) == 3
    assert len(DataProto(batch={}, non_tensor_batch=None, meta_info=None)) == 0
    for batch, message in (
        (
            {"input_ids": ids, "more": torch.ones(3)},
            "same number of rows, got {'input_ids': 2, 'more': 3, 'answer': 2}",
        ),
        ({"input_ids": [[1, 2]]}, r"input_ids must be a tensor \[B, ...\], got list"),
        ({"answer": ids}, "answer: given both as tensor and as non-tensor field"),
    ):
        with pytest.raises(ValueError, match=message):
            DataProto(batch=batch, non_tensor_batch={"answer": ["4", "7"]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch must be a dict of tensors, got Tensor"):
        DataProto(batch=ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="meta_info must be a dict, got list"):
        DataProto(meta_info=[1])  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _WithSource(DataProto):
    """A subclass that is a dataclass: its own `__init__` is made from the fields."""

    source: str = ""


def test_a_subclass_with_fields_of_its_own_is_checked_too() -> None:
    data = _WithSource(batch={"ids": torch.ones(2, 3)}, source="here")  # type: ignore[arg-type]
    assert len(data) == 2 and isinstance(data.batch, TensorDict) and data.source == "here"
    with pytest.raises(ValueError, match="same number of rows"):
        _WithSource(batch={"ids": torch.ones(2), "b": torch.ones(3)})  # type: ignore[arg-type]


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


def test_from_single_dict_sorts_fields_by_kind() -> None:
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": [1, "x"], "c": np.array([3, 4])}, {"step": 1})
    assert list(data.tensors) == ["a"] and list(data.non_tensor_batch) == ["b", "c"]
    assert list(data["b"]) == [1, "x"] and data["c"].dtype == object and data.meta_info == {"step": 1}
    assert list(data.to_dict()) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="b must be a list or an array"):
        DataProto.from_single_dict({"b": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="same number of rows"):
        DataProto.from_single_dict({"a": torch.zeros(2), "b": [1]})


def test_sparse_and_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    for value in (torch.eye(2).to_sparse(), nested):
        with pytest.raises(ValueError, match=r"a must be a tensor \[B, ...\]"):
            DataProto.from_dict({"a": value})
    for make in (DataProto.from_dict, lambda tensors: DataProto(TensorDict(tensors, batch_size=[2]))):
        with pytest.raises(ValueError, match="a has no values: it is on the device meta"):
            make({"a": torch.zeros(2, device="meta")})


def test_consistency_is_checked_again_on_request_and_before_rows_are_taken() -> None:
    data = batch_of(2)
    vars(data)["non_tensor_batch"]["late"] = np.array([None] * 3, dtype=object)
    for check in (data.check_consistency, lambda: data[0], lambda: data.chunk(2), lambda: DataProto.concat([data])):
        with pytest.raises(ValueError, match=r"same number of rows, got .*'late': 3"):
            check()
    vars(data)["non_tensor_batch"]["late"] = ["a", "b"]
    with pytest.raises(ValueError, match="late must be an object array"):
        data.check_consistency()
    vars(data)["non_tensor_batch"]["late"] = np.zeros(2)
    with pytest.raises(ValueError, match="late must be an object array"):
        data.check_consistency()
    del vars(data)["non_tensor_batch"]["late"]
    data.check_consistency()
    data.meta_info["_broadcast_non_tensor_batch"] = 1
    with pytest.raises(ValueError, match="_broadcast_non_tensor_batch must be True or False, got 1"):
        data.check_consistency()


def test_membership_is_by_name() -> None:
    assert "ids" in batch_of(2) and "name" in batch_of(0) and "step" not in batch_of(2)
    assert "ids" not in DataProto()


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
    meta: dict[str, Any] = {"tags": ["a"], "metrics": {"loss": [0.5]}}
    tensors: dict[str, Any] = {"a": torch.zeros(2)}
    objects: dict[str, Any] = {"b": [1, 2]}
    given = TensorDict(tensors, batch_size=[2])
    data = [DataProto.from_dict(tensors, objects, meta), DataProto(given, {}, meta)]
    for made in data:
        made.meta_info["tags"].append("b")
        made.meta_info["metrics"]["loss"].append(1.5)
        assert made.batch is not None
        made.batch["c"] = torch.ones(2)
        made.check_consistency()
    assert meta == {"tags": ["a"], "metrics": {"loss": [0.5]}}
    assert list(tensors) == ["a"] and list(given.keys()) == ["a"] and objects == {"b": [1, 2]}
    names = np.array(["a", "b"], dtype=object)
    for made in (DataProto.from_dict({}, {"names": names}), DataProto(None, {"names": names})):
        names[0] = "changed"
        assert list(made["names"]) == ["a", "b"]
        names[0] = "a"


def test_repr_names_fields_dtypes_and_shapes() -> None:
    data = batch_of(4, plan=PLAN, normalizers=NORMALIZERS)
    assert repr(data) == (
        "DataProto(4 rows, 112 B, batch={ids: int64[4, 3], score: float32[4]}, non_tensor_batch={name: object[4]}, "
        "meta_info={'step': 3, 'tags': ['a']}, plan=2 x 2 micro-batches, "
        "normalizers=LossNormalizers(tokens=9, sequences=4))"
    )
    assert repr(DataProto()) == "DataProto(0 rows, batch=None)"
    assert len(repr(DataProto(meta_info={"long": "x" * 1000, "t": torch.zeros(99)}))) < 140
    assert "33.6 MB" in repr(DataProto.from_dict({"a": torch.empty(4096, 1024, dtype=torch.int64)}))


def test_describe_is_a_table() -> None:
    score = torch.tensor([0.0, 1.0, float("nan"), 5.0])
    data = batch_of(4).update({"score": score, "flag": torch.tensor([True, False, False, False])})
    assert data.describe().splitlines() == [
        "4 rows, 116 B in tensors",
        "field  dtype      shape   bytes  values",
        "ids    int64      [4, 3]  96 B   0 .. 32, mean 16",
        "score  float32    [4]     16 B   0 .. 5, mean 2, 1 NaN or infinite",
        "flag   bool       [4]     4 B    0 .. 1, mean 0.25",
        "name   object     [4]            first 'row 0'",
        "step   meta_info                 3",
        "tags   meta_info                 ['a']",
    ]
    assert "no values" in batch_of(0).describe() and "no rows" in batch_of(0).describe()
    assert DataProto().describe().startswith("0 rows, 0 B in tensors")


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
        (range(3, 0, -2), [3, 1]),
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
        ((0, 1), TypeError, r"rows are given as a list: \[\[0, 1\]\], not \[0, 1\]"),
        (torch.tensor([0, 1, 1, 0], dtype=torch.uint8), TypeError, "a mask must be bool; got uint8"),
        (np.zeros(4, dtype=np.uint8), TypeError, "a mask must be bool; got uint8"),
        (None, TypeError, "not as NoneType"),
    ],
)
def test_what_names_no_row_is_refused(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_of(4)[index]


def test_select_idxs_takes_rows_alone() -> None:
    assert rows_of(batch_of(4).select_idxs((2, 1))) == [2, 1]
    with pytest.raises(TypeError, match="not as str"):
        batch_of(4).select_idxs("score")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ([0, 1, 2], ValueError, "each of 4 rows once; row 3 stands 0 times"),
        ([0, 1, 1, 2], ValueError, "row 1 stands 2 times"),
        ([0, 1, 2, 3, -1], ValueError, "row 3 stands 2 times"),
        ([True, False, True, True], ValueError, "row 1 stands 0 times"),
        ([0, 1, 2, 4], IndexError, "row 4 is outside"),
        (slice(None, None, -1), ValueError, "list or an array of row numbers, got slice"),
        ([0.0, 1.0, 2.0, 3.0], TypeError, "must be integers"),
    ],
)
def test_what_is_no_order_is_refused(order: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_of(4).reorder(order)


def test_iteration_yields_one_row_at_a_time() -> None:
    assert [rows_of(row) for row in batch_of(3)] == [[0], [1], [2]]


def test_pieces_of_no_size_are_refused() -> None:
    for size in (0, True, 1.0):
        with pytest.raises(ValueError, match=f"chunk needs a number of chunks of at least 1, got {size}"):
            batch_of(2).chunk(size)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"split needs a number of rows of at least 1, got {size}"):
            batch_of(2).split(size)  # type: ignore[arg-type]


def test_counts_that_make_no_sense_are_refused() -> None:
    data = batch_of(3)
    for times in (-1, True, 2.0):
        with pytest.raises(ValueError, match=f"times of at least 0, got {times}"):
            data.repeat(times)  # type: ignore[arg-type]
    assert len(data.repeat(np.int64(2))) == 6  # type: ignore[arg-type]
    for divisor in (0, -2, 2.0):
        with pytest.raises(ValueError, match=f"divisor of at least 1, got {divisor}"):
            data.pad_to_divisor(divisor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unpad of 4 rows from a batch of 3 rows"):
        data.unpad(4)
    with pytest.raises(ValueError, match="unpad needs a number of rows of at least 0, got -1"):
        data.unpad(-1)
    for arguments, message in (
        ((0,), "mini_batch_size of at least 1, got 0"),
        ((3.0,), "mini_batch_size of at least 1, got 3.0"),
        ((1, -1), "epochs of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            data.make_iterator(*arguments)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("nome", KeyError, "the batch lacks nome; it has f, ids, l, name, score"),
        ([], ValueError, "at least one name"),
        ("ids", ValueError, r"ids must have one value for each row, got \[3, 3\]"),
        (["name", "l"], ValueError, r"row 0 of l is \[0\], which cannot be hashed"),
        ("f", ValueError, "row 1 of f is NaN"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(names: Any, error: type[Exception], message: str) -> None:
    data = batch_of(3).update({"f": torch.tensor([0.0, float("nan"), 1.0]), "l": [[0], [0], [1]]})
    with pytest.raises(error, match=message):
        data.group_by(names)


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
        (
            DataProto.from_dict({"ids": torch.zeros(0).long(), "score": torch.zeros(0)}, {"name": []}, meta),
            r"int64\[2, 3\] in piece 0, int64\[0\] in piece 1",
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
    with pytest.raises(ValueError, match="piece 1 is a NoneType, not a DataProto"):
        DataProto.concat([batch_of(1), None])  # type: ignore[list-item]


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
        with pytest.raises(KeyError, match="the batch lacks name; it has ids, score"):
            select(["name"])
        with pytest.raises(KeyError, match="the batch lacks ids; it has name"):
            select([], ["ids"])


def test_meta_data_is_selected_and_popped_by_name() -> None:
    data = batch_of(2)
    assert data.select(meta_info_keys=["tags"]).meta_info == {"tags": ["a"]}
    popped, rest = data.pop(["ids"], meta_info_keys=["step"])
    assert popped.meta_info == {"step": 3} and rest.meta_info == {"tags": ["a"]}
    assert [part.meta_info for part in data.pop(["ids"])] == [data.meta_info] * 2
    for select in (data.select, data.pop):
        with pytest.raises(KeyError, match="meta_info lacks stop; it has step, tags"):
            select([], [], ["stop"])


def test_rename() -> None:
    data = batch_of(4, plan=PLAN)
    swapped = data.rename(["ids", "name"], ["name", "ids"])
    assert swapped["name"].tolist() == data["ids"].tolist() and list(swapped["ids"]) == list(data["name"])
    assert list(data.rename("ids", "input_ids").tensors) == ["input_ids", "score"]
    assert rows_of(data) == rows_of(data.rename([], [])) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("idz", "ids", KeyError, "the batch lacks idz; it has ids, name, score"),
        ("ids", "name", ValueError, "two fields would be named name"),
        (["ids", "score"], ["a", "a"], ValueError, "two fields would be named a"),
        (["ids", "score"], ["a"], ValueError, "one new name for each old name"),
        (["ids", "ids"], ["a", "b"], ValueError, "one new name for each old name"),
    ],
)
def test_names_that_do_not_pair_up_are_refused(old: Any, new: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_of(2).rename(old, new)


def test_update_adds_and_replaces_fields() -> None:
    data = batch_of(4, plan=PLAN)
    updated = data.update({"score": torch.ones(4, 2), "name": list("abcd"), "new": torch.zeros(4)})
    assert updated["score"].shape == (4, 2) and list(updated["name"]) == list("abcd")
    assert list(updated.tensors) == ["ids", "score", "new"] and updated.plan is PLAN
    assert rows_of(data) == rows_of(data.update({})) == [0, 1, 2, 3]
    assert len(DataProto().update({"a": [1, 2]})) == len(DataProto().update({"a": torch.zeros(2)})) == 2
    assert DataProto().update({}).batch is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"new": torch.zeros(3)}, "update of 2 rows with fields of 3 rows"),
        ({"name": torch.zeros(2)}, "name is ndarray, the new value is Tensor"),
        ({"score": [1.0, 2.0]}, "score is Tensor, the new value is ndarray"),
        ({"a": torch.zeros(2), "b": [1]}, "same number of rows"),
        ({"a": "ab"}, "a must be a list or an array"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch_of(2).update(fields)


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
        (3, "union with a int, not a DataProto"),
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
    trained = DataProto.from_dict({"x": torch.ones(2, requires_grad=True)})
    assert deepcopy(trained)["x"].requires_grad and deepcopy(trained)["x"] is not trained["x"]


def test_what_to_broadcast_is_a_property_and_the_documented_key() -> None:
    data = batch_of(2)
    assert data.broadcast_non_tensor is False
    asked = data.with_broadcast_non_tensor()
    assert asked.broadcast_non_tensor and asked.meta_info["_broadcast_non_tensor_batch"] is True
    assert not data.broadcast_non_tensor and not asked.with_broadcast_non_tensor(False).broadcast_non_tensor
    by_key = DataProto.from_dict({"a": torch.zeros(2)}, meta_info={"_broadcast_non_tensor_batch": True})
    for kept in (by_key, by_key.stub(), by_key.chunk(2)[1], pickle.loads(pickle.dumps(by_key))):
        assert kept.broadcast_non_tensor
    data.meta_info["_broadcast_non_tensor_batch"] = True
    assert data.broadcast_non_tensor
    data.meta_info["_broadcast_non_tensor_batch"] = "no"
    with pytest.raises(ValueError, match="must be True or False, got 'no'"):
        _ = data.broadcast_non_tensor
    with pytest.raises(ValueError, match="must be True or False, got None"):
        batch_of(2).with_broadcast_non_tensor(None)  # type: ignore[arg-type]
