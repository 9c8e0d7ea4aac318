"""How the meta data of pieces is joined: metrics by one rule, everything else only if it is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from roll.protocol import DataProto, collate_fn
from roll.protocol.joining import concat_tensors, same_value


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
    ],
)
def test_metrics_list_the_values_of_all_pieces(pieces: list[dict[str, Any]], joined: dict[str, list[float]]) -> None:
    assert DataProto.concat([measured(metrics) for metrics in pieces]).meta_info == {"metrics": joined}


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


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (float("nan"), float("nan"), True),
        (1, 1.0, True),
        (1, True, False),
        ([0], [False], False),
        (np.bool_(True), True, True),
        ([1, [2]], [1, [2]], True),
        ([1], (1,), False),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (np.array([1]), np.array([1.0]), False),
        (np.array([1]), [1], False),
        (torch.zeros(1), 0.0, False),
        (torch.zeros(1), torch.zeros(2), False),
        (np.array([None, float("nan")]), np.array([None, float("nan")]), True),
    ],
)
def test_what_is_the_same_value(a: Any, b: Any, same: bool) -> None:
    assert same_value(a, b) is same is same_value(b, a)


class Point:
    """Compares badly with everything that has no x."""

    def __init__(self, **values: int) -> None:
        self.__dict__.update(values)

    def __eq__(self, other: object) -> bool:
        return bool(self.x == other.x)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def objects(value: object, meta: object = 0) -> DataProto:
    field = np.empty(1, dtype=object)
    field[0] = value
    return DataProto.from_dict({"x": torch.zeros(1)}, non_tensors={"point": field}, meta_info={"origin": meta})


def test_values_that_cannot_be_compared_are_named() -> None:
    with pytest.raises(ValueError, match=r"union: non_tensor_batch point cannot be compared: AttributeError: .*'x'"):
        objects(Point(x=1)).union(objects(Point(y=1)))
    with pytest.raises(ValueError, match="union: meta_info origin cannot be compared: AttributeError"):
        objects(0, Point(x=1)).union(objects(0, Point(y=1)))
    with pytest.raises(ValueError, match="concat: meta_info origin cannot be compared: AttributeError"):
        DataProto.concat([objects(0, Point(x=1)), objects(0, Point(y=1))])
    with pytest.raises(ValueError, match="collate_fn: the meta_info of the rows cannot be compared: AttributeError"):
        collate_fn([measured({"m": Point(x=1)}), measured({"m": Point(y=1)})])
    assert len(objects(Point(x=1)).union(objects(Point(x=1)))) == 1
