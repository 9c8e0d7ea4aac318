"""A batch as verl's DataProto and as a TensorDict, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from roll.protocol import DataProto, from_tensordict, from_verl, to_tensordict, to_verl
from tests.protocol.batches import PLAN, assert_same, batch_of, batches, rows_of


@dataclass
class VerlLike:
    """The three attributes of verl's DataProto, and nothing of its code."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@given(batches())
def test_there_and_back(data: DataProto) -> None:
    assert_same(from_verl(to_verl(data, VerlLike)), data)
    back = from_tensordict(to_tensordict(data))
    assert_same(back.select(list(data.tensors), list(data.non_tensor_batch), list(data.meta_info)), data)


def test_verl_gets_a_batch_that_it_may_change() -> None:
    data = batch_of(4, plan=PLAN)
    theirs = to_verl(data, VerlLike)
    assert isinstance(theirs, VerlLike) and isinstance(theirs.batch, TensorDict)
    theirs.batch["new"] = torch.zeros(4)
    del theirs.non_tensor_batch["name"]
    theirs.meta_info["tags"].append("b")
    assert rows_of(data) == [0, 1, 2, 3] and "new" not in data


def test_what_verl_allows_becomes_ours() -> None:
    theirs = VerlLike(
        TensorDict({"x": torch.arange(3)}, batch_size=[3]),
        {"n": np.arange(3), "m": np.ones((3, 2)), "o": np.array(["a", None, 1], dtype=object)},
        {"metrics": [{"loss": 1.0}, {"loss": [2.0], "kl": 3.0}], "step": 1},
    )
    ours = from_verl(theirs)
    assert list(ours["n"]) == [0, 1, 2] and ours["m"][1].tolist() == [1.0, 1.0] and list(ours["o"]) == ["a", None, 1]
    assert ours.meta_info == {"metrics": {"loss": [1.0, 2.0], "kl": [3.0]}, "step": 1}
    ours.meta_info["step"] = 2
    assert theirs.meta_info["step"] == 1
    assert from_verl(VerlLike(None, {"a": np.array([1])}, {"metrics": None})).batch is None
    assert len(from_verl(VerlLike(TensorDict({}, batch_size=[3])))) == 3
    rows = lazy_stack([TensorDict({"x": torch.tensor(float(i))}, batch_size=[]) for i in range(3)])
    assert from_verl(VerlLike(rows))["x"].tolist() == [0.0, 1.0, 2.0]


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a dict is not like verl's DataProto: it has no batch, non_tensor_batch, meta"
    ):
        from_verl({"x": torch.zeros(2)})  # type: ignore[arg-type]
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="ids must be a tensor"):
        from_verl(VerlLike(TensorDict({"ids": nested}, batch_size=[2])))
    with pytest.raises(ValueError, match="same number of rows"):
        from_verl(VerlLike(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), {"a": np.zeros(3)}))
    with pytest.raises(ValueError, match="metrics must be a dict"):
        from_verl(VerlLike(meta_info={"metrics": [1.0]}))


def test_a_tensordict_keeps_objects_and_meta_data_apart() -> None:
    made = to_tensordict(batch_of(3))
    assert isinstance(made.get("name"), NonTensorStack) and isinstance(made.get("tags"), NonTensorData)
    assert made[1:]["name"] == ["row 1", "row 2"]
    assert rows_of(from_tensordict(made[1:])) == [1, 2]
    plain = TensorDict({"x": torch.zeros(2), "a": ["b", "c"]}, batch_size=[2])
    assert list(from_tensordict(plain, {"step": 1})["a"]) == ["b", "c"]


@pytest.mark.parametrize("rows", [0, 2])
def test_an_array_with_an_entry_for_each_row_stays_in_meta_info(rows: int) -> None:
    names = np.array(["a", "b"][:rows], dtype=object)
    data = batch_of(rows, meta_info={"names": names})
    assert_same(from_tensordict(to_tensordict(data)), data)


def test_what_does_not_fit_a_tensordict_is_refused() -> None:
    with pytest.raises(ValueError, match="ids: a field and an entry of meta_info"):
        to_tensordict(DataProto.from_dict({"ids": torch.zeros(1)}, meta_info={"ids": 1}))
    with pytest.raises(ValueError, match="a stub has no rows"):
        to_tensordict(batch_of(2).stub())
    with pytest.raises(ValueError, match="meta_info has different values of step"):
        from_tensordict(to_tensordict(batch_of(2)), {"step": 4})
    inner = TensorDict({"y": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(ValueError, match=r"x must be a tensor .* got TensorDict"):
        from_tensordict(TensorDict({"x": inner}, batch_size=[2]))
    with pytest.raises(ValueError, match="one batch dimension"):
        from_tensordict(TensorDict({"x": torch.zeros(2, 2)}, batch_size=[2, 2]))
