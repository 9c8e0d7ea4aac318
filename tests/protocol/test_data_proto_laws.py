"""DataProto: what holds for every batch, whatever its fields and its number of rows, none included."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from roll.protocol import DataProto, collate_fn, pad_dataproto_to_divisor, unpad_dataproto
from tests.protocol.batches import META, NORMALIZERS, PLAN, assert_same, batch_of, batches, content, rows_of

ROWS = st.integers(0, 7)
COUNTS = st.integers(1, 9)


@given(batches(), COUNTS)
def test_concat_undoes_chunk(data: DataProto, chunks: int) -> None:
    pieces = data.chunk(chunks)
    assert_same(DataProto.concat(pieces), data)
    expected = [len(piece) for piece in np.array_split(np.arange(len(data)), chunks)]
    assert [len(piece) for piece in pieces] == expected


@given(batches(), COUNTS)
def test_concat_undoes_split(data: DataProto, size: int) -> None:
    pieces = data.split(size)
    assert_same(DataProto.concat(pieces), data)
    assert all(len(piece) == size for piece in pieces[:-1]) and len(pieces[-1]) <= size
    assert len(pieces) == max(-(-len(data) // size), 1)


@given(st.lists(ROWS, min_size=1, max_size=4), st.data())
def test_concat_is_associative(sizes: list[int], data: st.DataObject) -> None:
    begins = np.cumsum([0, *sizes])
    whole = batch_of(sum(sizes))
    pieces = [whole[int(b) : int(b) + size] for b, size in zip(begins, sizes, strict=False)]
    metrics = [{"metrics": {"loss": [float(n)]}} for n in range(len(pieces))]
    pieces = [DataProto(p.batch, p.non_tensor_batch, p.meta_info | m) for p, m in zip(pieces, metrics, strict=True)]
    at = data.draw(st.integers(1, len(pieces)))
    left = [DataProto.concat(pieces[:at]), *pieces[at:]]
    assert_same(DataProto.concat(left), DataProto.concat(pieces))
    assert rows_of(DataProto.concat(pieces)) == list(range(sum(sizes)))


@given(batches(), st.integers(0, 3))
def test_repeat(data: DataProto, times: int) -> None:
    rows = range(len(data))
    assert_same(data.repeat(times), data[[row for row in rows for _ in range(times)]])
    assert_same(data.repeat(times, interleave=False), data[list(rows) * times])
    assert_same(data.repeat(1), data)


@given(batches(), st.randoms())
def test_reorder_and_its_inverse(data: DataProto, random: Any) -> None:
    order = list(range(len(data)))
    random.shuffle(order)
    inverse = sorted(range(len(data)), key=order.__getitem__)
    assert_same(data.reorder(order).reorder(inverse), data)
    assert_same(data.reorder(order), data.select_idxs(order))
    assert rows_of(batch_of(len(data)).reorder(np.array(order, dtype=np.int32))) == order


@given(batches(), COUNTS)
def test_unpad_undoes_pad_to_divisor(data: DataProto, divisor: int) -> None:
    padded, count = data.pad_to_divisor(divisor)
    assert len(padded) % divisor == 0 and 0 <= count < divisor
    assert_same(padded.unpad(count), data)
    again, size = pad_dataproto_to_divisor(data, divisor)
    assert size == count
    assert_same(again, padded)
    assert_same(unpad_dataproto(padded, count), data)


def test_padding_takes_rows_from_the_first_on_as_often_as_it_needs() -> None:
    assert rows_of(batch_of(3).pad_to_divisor(8)[0]) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert rows_of(batch_of(0).pad_to_divisor(8)[0]) == []


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=7))
def test_groups_hold_every_row_once_in_order(values: list[Any]) -> None:
    data = batch_of(len(values)).update({"kind": values, "even": torch.arange(len(values)) % 2})
    groups = data.group_by("kind")
    assert list(groups) == list(dict.fromkeys(values))
    for value, group in groups.items():
        assert rows_of(group) == [row for row, kind in enumerate(values) if kind == value]
    pairs = data.group_by(["kind", "even"])
    assert list(pairs) == list(dict.fromkeys((value, row % 2) for row, value in enumerate(values)))
    assert sum(map(len, pairs.values())) == len(values)


@given(batches(), st.data())
def test_select_pop_rename_and_union_lose_nothing(data: DataProto, draw: st.DataObject) -> None:
    names = draw.draw(st.lists(st.sampled_from(list(data.to_dict())), unique=True)) if data.to_dict() else []
    tensors = [name for name in names if name in data.tensors]
    objects = [name for name in names if name not in data.tensors]
    popped, rest = data.pop(tensors, objects)
    assert sorted(popped.to_dict()) == sorted(names)
    assert len(popped) == len(rest) == len(data)
    assert_same(popped.union(rest).select(list(data.tensors), list(data.non_tensor_batch)), data)
    assert_same(data.union(data), data)
    new = [f"new {name}" for name in names]
    assert_same(data.rename(names, new).rename(new, names), data)
    assert_same(data.update(popped.to_dict()), data)
    assert_same(DataProto.from_single_dict(data.to_dict(), data.meta_info), data) if data.to_dict() else None


@given(batches())
def test_copies_are_equal(data: DataProto) -> None:
    for copied in (data.clone(), copy.copy(data), copy.deepcopy(data), data.to("cpu"), data.select(), data[:]):
        assert_same(copied, data)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert_same(pickle.loads(pickle.dumps(data, protocol)), data)
    assert repr(data).startswith(f"DataProto({len(data)} rows, ")
    assert data.describe().startswith(f"{len(data)} rows, ")


@given(batches(st.integers(0, 6)), st.integers(1, 3), st.integers(0, 5))
def test_mini_batches_hold_every_row_once_in_each_epoch(data: DataProto, size: int, seed: int) -> None:
    data = data.pad_to_divisor(size)[0].update({"row": torch.arange(len(data.pad_to_divisor(size)[0]))})
    drawn = [piece["row"].tolist() for piece in data.make_iterator(size, epochs=2, seed=seed)]
    half = len(drawn) // 2
    for epoch in (drawn[:half], drawn[half:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(len(data)))
    assert all(len(rows) == size for rows in drawn)
    assert drawn == [piece["row"].tolist() for piece in data.make_iterator(size, epochs=2, seed=seed)]


@given(batches(st.integers(1, 6)), COUNTS)
def test_a_data_loader_gives_the_rows_of_the_batch(data: DataProto, size: int) -> None:
    loaded = list(DataLoader(data, batch_size=size, collate_fn=collate_fn))  # type: ignore[arg-type]
    if len(data) == 0:  # a batch of no fields has no rows
        assert loaded == []
        return
    assert [len(piece) for piece in loaded] == [len(piece) for piece in data.split(size)]
    for piece, expected in zip(loaded, data.split(size), strict=True):
        assert_same(piece, DataProto(expected.batch, expected.non_tensor_batch, data.meta_info))


def changed_rows(data: DataProto) -> dict[str, DataProto]:
    """Results of the methods that take, order or join rows, for four rows."""
    return {
        "number": data[1],
        "slice": data[1:],
        "list": data[[0, 2]],
        "select_idxs": data.select_idxs([True, False, True, False]),
        "reorder": data.reorder([3, 2, 1, 0]),
        **{f"chunk {number}": piece for number, piece in enumerate(data.chunk(2))},
        **{f"split {number}": piece for number, piece in enumerate(data.split(3))},
        "repeat": data.repeat(2),
        "repeat in turn": data.repeat(2, interleave=False),
        "pad_to_divisor": data.pad_to_divisor(3)[0],
        "unpad": data.unpad(1),
        **{f"group {name}": group for name, group in data.group_by("name").items()},
        **{f"mini-batch {number}": piece for number, piece in enumerate(data.make_iterator(2, seed=1))},
        "concat of one": DataProto.concat([data]),
        "concat": DataProto.concat([data, data]),
        "collate_fn": collate_fn([data[0], data[1]]),
    }


def same_rows(data: DataProto) -> dict[str, DataProto]:
    """Results of all other methods."""
    popped, rest = data.pop(["ids"], ["name"], ["step"])
    return {
        "select": data.select(["ids"], []),
        "pop": popped,
        "rest of pop": rest,
        "rename": data.rename("ids", "input_ids"),
        "update": data.update({"ids": torch.zeros(4), "more": [1, 2, 3, 4]}),
        "union": data.union(data.rename(["ids", "score", "name"], ["a", "b", "c"])),
        "stub": data.stub(),
        "with_normalizers": data.with_normalizers(None),
        "with_broadcast_non_tensor": data.with_broadcast_non_tensor(),
        "to": data.to("cpu"),
        "clone": data.clone(),
        "copy": copy.copy(data),
        "pickle": pickle.loads(pickle.dumps(data)),
    }


def test_no_method_changes_its_batch_and_no_result_shares_meta_data() -> None:
    data = batch_of(4, meta_info={**META, "metrics": {"loss": [0.5]}, "t": torch.zeros(2)})
    before = str(content(data))
    results = {**changed_rows(data), **same_rows(data)}
    for name, result in results.items():
        result.meta_info.setdefault("tags", []).append(name)
        result.meta_info.setdefault("metrics", {}).setdefault("loss", []).append(name)
        result.meta_info.setdefault("t", torch.zeros(2)).fill_(len(name))
        if result.batch is not None:
            result.batch["new"] = torch.zeros(len(result))
        vars(result)["non_tensor_batch"]["new"] = np.empty(len(result), dtype=object)
    assert str(content(data)) == before
    assert [result.meta_info["tags"][-1] for result in results.values()] == list(results)
    assert [result.meta_info["t"][0].item() for result in results.values()] == list(map(len, results))


def test_plan_and_normalizers_stay_with_the_rows_and_leave_with_them() -> None:
    data = batch_of(4, plan=PLAN, normalizers=NORMALIZERS)
    for name, result in changed_rows(data).items():
        assert result.plan is None and result.normalizers is None, name
    for name, result in same_rows(data).items():
        kept = None if name == "with_normalizers" else NORMALIZERS
        assert (result.plan, result.normalizers) == (PLAN, kept), name
