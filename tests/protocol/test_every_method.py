"""Every method that returns a batch keeps its class and its device. Found by reflection, so that none is forgotten."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import roll.protocol
from roll.platform import get_platform
from roll.protocol import DataProto, DataProtoFuture, collate_fn, pad_dataproto_to_divisor, unpad_dataproto
from roll.protocol.tensors import tensor_dict
from tests.protocol.batches import NORMALIZERS, batch_of


@dataclass(frozen=True, eq=False, repr=False)
class Rollouts(DataProto):
    """A user's class with a field of its own."""

    source: str = "nowhere"


CALLS: dict[str, Callable[[Any], Any]] = {
    "__getitem__": lambda data: [data[1], data[1:], data[[0, 2]], data[np.array([True] * 4)]],
    "__iter__": iter,
    "chunk": lambda data: data.chunk(3),
    "clone": lambda data: data.clone(),
    "concat": lambda data: [type(data).concat([data, data]), DataProto.concat([data])],
    "from_dict": lambda data: placed(data, type(data).from_dict(data.tensors, data.non_tensor_batch)),
    "from_single_dict": lambda data: placed(data, type(data).from_single_dict(data.to_dict())),
    "from_tensordict": lambda data: replace(type(data).from_tensordict(data.to_tensordict()), source=data.source),
    "group_by": lambda data: data.group_by("name"),
    "make_iterator": lambda data: data.make_iterator(2, seed=1),
    "materialize_concat": lambda data: type(data).materialize_concat([arrived(data), arrived(data)]),
    "pad_to_divisor": lambda data: data.pad_to_divisor(3),
    "padding": lambda data: [data.padding(2), data.padding(0)],
    "pop": lambda data: data.pop("ids", "name", "step"),
    "rename": lambda data: data.rename("ids", "input_ids"),
    "reorder": lambda data: data.reorder([3, 2, 1, 0]),
    "repeat": lambda data: [data.repeat(2), data.repeat(2, interleave=False)],
    "sample_level_repeat": lambda data: data.sample_level_repeat([0, 1, 2, 0]),
    "select": lambda data: [data.select("ids", []), data.select(deepcopy=True)],
    "select_fields": lambda data: data.select_fields(["name", "ids"]),
    "select_idxs": lambda data: data.select_idxs([2, 2]),
    "slice": lambda data: data.slice(1, 3),
    "split": lambda data: data.split(3),
    "stub": lambda data: data.stub(),
    "to": lambda data: data.to(data.batch.device),
    "unfold_column_chunks": lambda data: data.unfold_column_chunks(3, ["ids"]),
    "union": lambda data: joined(data),
    "unpad": lambda data: data.unpad(1),
    "update": lambda data: [data.update({"ids": data["score"]}), data.update({"more": [1, 2, 3, 4]}), data.update({})],
    "with_broadcast_non_tensor": lambda data: data.with_broadcast_non_tensor(),
    "with_normalizers": lambda data: data.with_normalizers(NORMALIZERS),
    "with_plan": lambda data: data.with_plan(None),
    # functions and what stands beside the methods
    "collate_fn": lambda data: collate_fn(list(data)),
    "pad_dataproto_to_divisor": lambda data: pad_dataproto_to_divisor(data, 3),
    "unpad_dataproto": lambda data: unpad_dataproto(data, 1),
    "replace": lambda data: replace(data, meta_info={}),
    "future": lambda data: [DataProtoFuture.concat([arrived(data)]).chunk(2)[1].get(), future_with_head(data).stub()],
}
MAKES_NEW = {"from_tensordict", "from_verl", "load_from_disk"}
"""Read a batch from elsewhere: `load_from_disk` gives the class that was saved, as the test of files says."""


def arrived(data: DataProto) -> Future[DataProto]:
    future: Future[DataProto] = Future()
    future.set_result(data)
    return future


def future_with_head(data: DataProto) -> DataProtoFuture:
    return DataProtoFuture.concat([arrived(data)], [len(data)], [data[:0]])


def placed(data: Any, made: Any) -> Any:
    """A batch that was made of fields alone, which tell neither a device nor what a subclass adds."""
    assert made.batch.device is None
    return replace(made, batch=made.batch.to(data.batch.device), source=data.source)


def joined(data: DataProto) -> list[DataProto]:
    """Unions with a batch of the base class, which has no device, and with one without tensors."""
    others = [batch_of(4).rename(["ids", "score", "name"], ["a", "b", "c"]), DataProto(None, {"more": [1, 2, 3, 4]})]
    return [data.union(others[1]), data.union(data)] + ([] if data["ids"].is_meta else [data.union(others[0])])


def rollouts(device: torch.device) -> Rollouts:
    """Four rows whose TensorDict has this device. By hand, since tensors on the device meta are refused."""
    data = Rollouts(**vars(batch_of(4)), source="here")
    vars(data)["batch"] = tensor_dict({name: value.to(device) for name, value in data.tensors.items()}, 4, device)
    return data


def found(result: Any) -> Iterator[DataProto]:
    """The batches in what a method returned."""
    if isinstance(result, DataProto):
        yield result
    elif isinstance(result, Mapping):
        yield from found(result.values())
    elif isinstance(result, Iterable) and not isinstance(result, str):
        for part in result:
            yield from found(part)


def returns_a_batch(function: Any) -> bool:
    says = str(inspect.signature(function).return_annotation)
    return any(name in says for name in ("Self", "DataProto", "Rollouts")) and "DataProtoFuture" not in says


def test_every_method_that_returns_a_batch_is_tried_here() -> None:
    public = {name: getattr(DataProto, name) for name in dir(DataProto) if not name.startswith("_")}
    dunder = {name: getattr(DataProto, name) for name in ("__getitem__", "__iter__")}
    functions = {name: getattr(roll.protocol, name) for name in roll.protocol.__all__}
    callables = {name: value for name, value in {**public, **dunder, **functions}.items() if inspect.isroutine(value)}
    names = {value.__name__ for value in callables.values() if returns_a_batch(value)}
    assert len(names) > 30
    assert sorted(names - MAKES_NEW - CALLS.keys()) == []


@pytest.mark.parametrize("name", sorted(CALLS))
def test_class_and_device_are_kept(name: str) -> None:
    for device in {torch.device("cpu"), get_platform().device()}:
        data = rollouts(device)
        batches = list(found(CALLS[name](data)))
        assert batches
        for batch in batches:
            assert type(batch) is Rollouts and batch.source == "here"
            assert (batch.batch is None) == (name in ("stub", "future") and not len(batch))
            assert batch.batch is None or batch.batch.device == data["ids"].device == batch.batch.device
        assert data.batch is not None and data.batch.device == data["ids"].device


ROWS_ALONE = {
    *("__getitem__", "__iter__", "chunk", "concat", "future", "group_by", "make_iterator"),
    *("materialize_concat", "pad_dataproto_to_divisor", "pad_to_divisor", "padding", "reorder", "repeat"),
    *("sample_level_repeat", "select_idxs", "slice", "split", "unfold_column_chunks", "unpad", "unpad_dataproto"),
}
"""Methods that take rows of a batch, and so check nothing that was checked when it was made."""


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_device_need_not_be_one_of_this_machine(name: str) -> None:
    """On `meta`, where no value is: rows stay there, and a batch that is made anew is refused by name."""
    data = rollouts(torch.device("meta"))
    if name in ROWS_ALONE:
        devices = {batch.batch.device for batch in found(CALLS[name](data)) if batch.batch is not None}
        assert devices == {torch.device("meta")}
    elif name != "stub":
        with pytest.raises(ValueError, match="has no values: it is on the device meta"):
            list(found(CALLS[name](data)))


def test_to_sets_the_device() -> None:
    data = batch_of(4)
    assert data.batch is not None and data.batch.device is None
    moved = data.to("cpu")
    assert moved.batch is not None and moved.batch.device == torch.device("cpu")
    with pytest.raises(ValueError, match="ids has no values: it is on the device meta"):
        data.to("meta")
    assert DataProto().to("cpu").batch is None


def test_no_tensor_moves_because_the_batch_has_a_device() -> None:
    tensors = {"here": torch.zeros(2), "there": torch.zeros(2, device="meta")}
    assert tensor_dict(tensors, 2, torch.device("cpu")).device is None
    assert tensor_dict(tensors, 2, torch.device("cpu"))["there"].is_meta
    assert tensor_dict({"there": tensors["there"]}, 2, torch.device("meta")).device == torch.device("meta")
    assert tensor_dict({"here": tensors["here"]}, 2, torch.device("cpu", 0)).device == torch.device("cpu", 0)
    assert tensor_dict({}, 2, torch.device("meta")).device == torch.device("meta")


def test_a_pickle_and_a_file_keep_class_field_and_that_there_is_a_device(tmp_path: Path) -> None:
    data = rollouts(torch.device("cpu"))
    data.save_to_disk(tmp_path / "batch")
    for back in (pickle.loads(pickle.dumps(data)), DataProto.load_from_disk(tmp_path / "batch")):
        assert isinstance(back, Rollouts) and back.source == "here"
        assert back.batch is not None and back.batch.device == torch.device("cpu")
    without = pickle.loads(pickle.dumps(replace(data, batch=TensorDict(data.tensors, batch_size=[4]))))
    assert without.batch.device is None
    assert pickle.loads(pickle.dumps(data.stub())).batch is None
