"""How the meta data of pieces is joined: metrics by one rule, everything else only if it is the same."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from roll.protocol import DataProto, DataProtoFuture, collate_fn
from roll.protocol.joining import concat_tensors


def measured(metrics: Any, rows: int = 1, **meta: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.zeros(rows)}, meta_info={"metrics": metrics, **meta})


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ([{"loss": 1.0}], {"loss": [1.0]}),
        ([{"loss": 1.0}, {"loss": 2.0}], {"loss": [1.0, 2.0]}),
        ([{"loss": [1.0, 2.0]}, {"loss": 3.0}], {"loss": [1.0, 2.0, 3.0]}),
        ([{"loss": 1.0}, {"kl": 2.0}, {"loss": 3.0, "kl": 4.0}], {"loss": [1.0, 3.0], "kl": [2.0, 4.0]}),
        ([{}, {"loss": (1.0,)}], {"loss": [1.0]}),
        ([{"loss": []}], {"loss": []}),
        # arrays and tensors are as many values as they have
        ([{"loss": np.array([0.1, 0.2])}, {"loss": np.array([0.15])}], {"loss": [0.1, 0.2, 0.15]}),
        ([{"loss": np.array([])}, {"loss": np.array(0.5)}], {"loss": [0.5]}),
        ([{"loss": np.array([[1.0, 2.0], [3.0, 4.0]])}], {"loss": [1.0, 2.0, 3.0, 4.0]}),
        ([{"loss": torch.tensor(0.5)}, {"loss": torch.tensor([0.25, 2.0])}], {"loss": [0.5, 0.25, 2.0]}),
        ([{"loss": torch.tensor([1.5], dtype=torch.bfloat16)}, {"loss": torch.zeros(0)}], {"loss": [1.5]}),
        ([{"loss": torch.tensor([1.0, 2.0], requires_grad=True)}], {"loss": [1.0, 2.0]}),
        ([{"n": np.int64(3)}, {"n": np.float64(0.5)}, {"n": np.bool_(True)}], {"n": [3, 0.5, True]}),
        # kinds may be mixed and nested
        ([{"n": 1}, {"n": torch.tensor([2])}, {"n": (np.array([3]), [4, np.int32(5)])}], {"n": [1, 2, 3, 4, 5]}),
        ([{"n": [[1], [2, [3]]]}, {"n": np.array([4, np.array([5, 6])], dtype=object)}], {"n": [1, 2, 3, 4, 5, 6]}),
        ([{"why": "eos"}, {"why": ["len", None]}, {"why": np.array(["eos"])}], {"why": ["eos", "len", None, "eos"]}),
        # more names
        ([{"a": {"kl": 1.0}}, {"a": {"kl": np.array([2.0]), "n": 3}}], {"a": {"kl": [1.0, 2.0], "n": [3]}}),
        ([{"a": [{"kl": 1.0}, {"kl": 2.0}]}, {"a": {"b": {"c": 1}}}], {"a": {"kl": [1.0, 2.0], "b": {"c": [1]}}}),
        # a list of dicts, as verl's workers have them, and no metrics
        ([[{"loss": 0.5}, {"loss": 0.6, "kl": 1.0}], {"loss": 0.7}], {"loss": [0.5, 0.6, 0.7], "kl": [1.0]}),
        ([{"loss": 0.5}, None], {"loss": [0.5]}),
        ([[]], {}),
    ],
)
def test_metrics_list_the_values_of_all_pieces(pieces: list[dict[str, Any]], joined: dict[str, list[float]]) -> None:
    joined_meta = DataProto.concat([measured(metrics) for metrics in pieces]).meta_info
    assert joined_meta == {"metrics": joined}
    assert repr(joined_meta["metrics"]) == repr(joined)  # Python numbers, no NumPy scalars


def test_metrics_that_only_some_pieces_have_are_joined_too() -> None:
    without = DataProto.from_dict({"x": torch.zeros(1)})
    assert DataProto.concat([without, measured({"loss": 1.0})]).meta_info == {"metrics": {"loss": [1.0]}}
    assert DataProto.concat([without, without]).meta_info == {}


def test_metrics_put_in_by_hand_are_joined_by_the_same_rule() -> None:
    pieces = [DataProto.from_dict({"x": torch.zeros(1)}) for _ in range(2)]
    for number, piece in enumerate(pieces):
        piece.meta_info["metrics"] = {"loss": float(number)}
    assert DataProto.concat(pieces).meta_info == {"metrics": {"loss": [0.0, 1.0]}}
    assert pieces[0].meta_info == {"metrics": {"loss": 0.0}}
    pieces[0].meta_info["metrics"] = 0.5
    with pytest.raises(ValueError, match=r"metrics must be a dict of names and values, got 0\.5"):
        DataProto.concat(pieces)


def test_devices_are_compared() -> None:
    with pytest.raises(ValueError, match=r"x is float32\[1\] in piece 0, float32\[1\] on meta in piece 1"):
        concat_tensors([{"x": torch.zeros(1)}, {"x": torch.zeros(1, device="meta")}])


def test_metrics_are_a_dict() -> None:
    with pytest.raises(ValueError, match=r"metrics must be a dict of names and values, got \[1\]"):
        measured([1])


def test_metrics_without_a_form_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"metrics: loss has a dict of more names beside values: \[\[1.0\], {'a': \[2.0\]}\]"
    ):
        DataProto.concat([measured({"loss": 1.0}), measured({"loss": {"a": 2.0}})])
    endless: list[Any] = []
    endless.append(endless)
    array = np.empty(1, dtype=object)
    array[0] = array
    names: dict[str, Any] = {}
    names["loss"] = names
    for value in (endless, array, names):
        with pytest.raises(ValueError, match="metrics: loss is nested too deeply, or contains itself"):
            measured({"loss": value})


def test_global_keys_list_the_values_of_all_pieces() -> None:
    pieces = [
        measured({"loss": n}, lr=0.1 * n, sizes=[n, n], step=3, at=(n, {"k": n}), seen={"n": [n]}) for n in (1, 2)
    ]
    meta = {
        "step": 3,
        "lr": [0.1, 0.2],
        "sizes": [[1, 1], [2, 2]],
        "at": [(1, {"k": 1}), (2, {"k": 2})],
        "seen": {"n": [[1], [2]]},
        "metrics": {"loss": [1, 2]},
    }
    names = ["lr", "sizes", "at", "seen"]
    for keys in (names, set(names), (*names, "metrics", "not there")):
        joined = DataProto.concat(pieces, global_keys=keys)
        assert joined.meta_info == meta
        assert list(joined.meta_info) == list(meta)  # in the order of the pieces, whatever the order of a set
    assert DataProto.concat(pieces[:1], global_keys=["lr", "at"]).meta_info["at"] == [(1, {"k": 1})]
    assert DataProto.concat([measured({}, at={"k": 1}), measured({}, at=2)], global_keys="at").meta_info["at"] == [
        {"k": 1},
        2,
    ]
    joined = DataProto.concat(pieces, global_keys=names).meta_info
    joined["sizes"][0].append(3)
    assert pieces[0].meta_info["sizes"] == [1, 1]
    for keys in (None, [], "lr", {"metrics"}):
        with pytest.raises(ValueError, match=r"piece 1; global_keys lists the values of all pieces, select\(meta_info"):
            DataProto.concat(pieces, global_keys=keys)
    only_here = [measured({}, step=3), measured({}, step=3, config="A")]
    with pytest.raises(ValueError, match="config is not in both piece 0 and piece 1; global_keys lists"):
        DataProto.concat(only_here)
    assert DataProto.concat(only_here, global_keys="config").meta_info == {"step": 3, "config": ["A"], "metrics": {}}
    references: list[Future[DataProto]] = [Future() for _ in pieces]
    for reference, piece in zip(references, pieces, strict=True):
        reference.set_result(piece)
    keys = set(names)
    assert DataProto.materialize_concat(references, global_keys=keys).meta_info == meta
    nested = DataProtoFuture.concat([DataProtoFuture.concat(references)])
    assert nested.get(global_keys=keys).meta_info == meta


def test_pieces_of_one_batch_count_its_metrics_once() -> None:
    data = measured({"loss": [1.0, 2.0]}, rows=4, step=3)
    for pieces in (data.chunk(3), data.split(3), data.chunk(9)):
        assert [piece.meta_info for piece in pieces[1:]] == [{"step": 3}] * (len(pieces) - 1)
        assert DataProto.concat(pieces).meta_info == data.meta_info
    for epochs in (1, 2):
        assert DataProto.concat(list(data.make_iterator(2, epochs, seed=1))).meta_info == data.meta_info
    groups = data.update({"kind": ["a", "b", "a", "c"]}).group_by("kind").values()
    assert [len(group) for group in groups] == [2, 1, 1]
    assert DataProto.concat(list(groups)).meta_info == data.meta_info
    assert collate_fn(list(data)).meta_info == data.meta_info
    assert data[1:].meta_info == data.meta_info  # taken alone, so with all that is known of it


def test_collate_fn_refuses_rows_of_different_batches() -> None:
    with pytest.raises(ValueError, match="meta_info of row 0 and row 1 differ"):
        collate_fn([measured({"loss": 1.0}), measured({"loss": 2.0})])
    with pytest.raises(ValueError, match="meta_info step is 1 in piece 0, 2 in piece 1"):
        collate_fn([measured({}, step=1), measured({}, step=2)])
    with pytest.raises(ValueError, match="at least one piece"):
        collate_fn([])


def test_union_merges_metrics_name_by_name() -> None:
    ours, theirs = measured({"loss": 1.0, "kl": 2.0}), measured({"kl": [2.0], "entropy": 3.0})
    assert ours.union(theirs).meta_info == {"metrics": {"loss": [1.0], "kl": [2.0], "entropy": [3.0]}}
    assert ours.union(DataProto.from_dict({"y": torch.zeros(1)})).meta_info == ours.meta_info
    with pytest.raises(ValueError, match="meta_info metrics has different values of loss"):
        ours.union(measured({"loss": 2.0}))


def test_arrays_and_tensors_in_meta_data_are_compared_by_value() -> None:
    def piece(value: float) -> DataProto:
        meta = {"t": torch.tensor([value, float("nan")]), "a": np.array([value]), "n": {"x": [value]}}
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info=meta)

    assert len(DataProto.concat([piece(1.0), piece(1.0)])) == 2
    assert len(piece(1.0).union(piece(1.0))) == 1
    with pytest.raises(ValueError, match="meta_info t is"):
        DataProto.concat([piece(1.0), piece(2.0)])


def test_rows_of_objects_alone_are_joined_with_an_empty_batch_or_none() -> None:
    bare, empty = DataProto(non_tensor_batch={"x": ["a"]}), DataProto.from_dict(non_tensors={"x": ["b", "c"]})
    assert bare.batch is None and empty.batch is not None
    for pieces in ([bare, empty], [empty, bare], [bare, bare], [empty, empty]):
        joined = DataProto.concat(pieces)
        assert len(joined) == sum(map(len, pieces))
        assert joined["x"].tolist() == [value for piece in pieces for value in piece["x"]]
    with_tensors = DataProto.from_dict({"y": torch.zeros(1)}, {"x": ["a"]})
    for pieces in ([bare, with_tensors], [with_tensors, bare, empty]):
        with pytest.raises(ValueError, match="concat: of piece 0 and piece 1 one has no batch"):
            DataProto.concat(pieces)
    with pytest.raises(ValueError, match="y is not in both piece 0 and piece 1"):
        DataProto.concat([empty, with_tensors])
