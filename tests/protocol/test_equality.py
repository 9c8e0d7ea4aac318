"""Values compared, digested and copied through and through: NaN, tensors within objects, values without an end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from roll.protocol import DataProto
from roll.protocol.digest import digest
from roll.protocol.equality import NotComparable, same_value


@dataclass
class Scored:
    """A dataclass, whose own `==` fails for a tensor, and for an object that contains itself."""

    score: Any
    rest: list[Any] = field(default_factory=list)


class Raises:
    def __eq__(self, other: object) -> bool:
        raise OSError("no disk")

    __hash__ = None  # type: ignore[assignment]


class GivesArray:
    def __eq__(self, other: object) -> Any:
        return np.array([True, True])

    __hash__ = None  # type: ignore[assignment]


def rows(*values: Any) -> np.ndarray:
    """An object array [B]."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def loops(kind: str, leaf: Any = 0, period: int = 1) -> Any:
    """A container that contains itself, after `period` steps, beside a leaf."""
    makers: dict[str, Callable[[], Any]] = {
        "array": lambda: rows(None, leaf),
        "list": lambda: [None, leaf],
        "dict": lambda: {0: None, 1: leaf},
        "dataclass": lambda: Scored(leaf, [None]),
    }
    ring = [makers[kind]() for _ in range(period)]
    for number, value in enumerate(ring):
        follower = ring[(number + 1) % period]
        if kind == "dataclass":
            value.rest[0] = follower
        else:
            value[0] = follower
    return ring[0]


def nested(depth: int, leaf: Any) -> list[Any]:
    value = [leaf]
    for _ in range(depth):
        value = [value]
    return value


def with_objects(*objects: Any) -> DataProto:
    return DataProto.from_dict({}, {"objects": rows(*objects)})


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
        (np.array([None, float("nan")]), np.array([None, 1.0]), False),
        (np.array([1.0, float("nan")]), np.array([float("nan"), 1.0]), False),
        (np.array(["a", "b"]), np.array(["a", "b"]), True),
        (np.array(["NaT", "2026-01-01"], "M8[D]"), np.array(["NaT", "2026-01-01"], "M8[D]"), True),
        (np.array([(1, 2.0)], "i4,f4"), np.array([(1, 2.0)], "i4,f4"), True),
        (np.float32("nan"), float("nan"), True),
        (Decimal("nan"), Decimal("nan"), True),
        (torch.zeros(1), torch.zeros(1, device="meta"), False),
        (torch.zeros(1, device="meta"), torch.zeros(1, device="meta"), True),
        ([{"t": torch.tensor([1.0, float("nan")])}], [{"t": torch.tensor([1.0, float("nan")])}], True),
        ([{"t": torch.tensor([1.0, 2.0])}], [{"t": torch.tensor([1.0, 3.0])}], False),
        (rows(np.arange(2), rows(np.arange(3), "x")), rows(np.arange(2), rows(np.arange(3), "x")), True),
        (rows(np.arange(2), rows(np.arange(3), "x")), rows(np.arange(2), rows(np.arange(3), "y")), False),
        (Scored(torch.zeros(2)), Scored(torch.zeros(2)), True),
        (Scored(torch.zeros(2)), Scored(torch.ones(2)), False),
        (Scored(float("nan")), Scored(float("nan")), True),
        (TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": torch.zeros(2)}, [2]), True),
        (TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": torch.ones(2)}, [2]), False),
    ],
)
def test_what_is_the_same_value(a: Any, b: Any, same: bool) -> None:
    assert same_value(a, b) is same is same_value(b, a)


@pytest.mark.parametrize("kind", ["array", "list", "dict", "dataclass"])
def test_what_contains_itself_is_compared(kind: str) -> None:
    assert same_value(loops(kind), loops(kind))
    assert same_value(loops(kind, period=2), loops(kind, period=3))  # no walk through the two finds a difference
    assert not same_value(loops(kind, 1), loops(kind, 2))
    assert not same_value(loops(kind), {"array": rows, "list": lambda *v: list(v)}.get(kind, Scored)(None, 0))
    ours, theirs = with_objects(loops(kind), 1), with_objects(loops(kind), 1)
    assert len(ours.union(theirs)) == 2
    with pytest.raises(ValueError, match="non_tensor_batch has different values of objects"):
        ours.union(with_objects(loops(kind, 5), 1))


def test_many_paths_to_one_pair_are_walked_once() -> None:
    def diamond() -> list[Any]:
        value: list[Any] = [0]
        for _ in range(60):  # 2 ** 60 paths
            value = [value, value]
        return value

    assert same_value(diamond(), diamond())


def test_any_depth_is_compared() -> None:
    assert same_value(nested(100_000, 1.5), nested(100_000, 1.5))
    assert not same_value(nested(100_000, 1.5), nested(100_000, 2.5))


def test_what_cannot_be_compared_is_named() -> None:
    for value, why in ((Raises(), "OSError: no disk"), (GivesArray(), "ValueError: The truth value of an array")):
        kind = type(value).__name__
        with pytest.raises(NotComparable, match=f"a {kind} cannot be compared: {why}"):
            same_value(value, type(value)())
        with pytest.raises(ValueError, match=f"union: objects of non_tensor_batch: a {kind} cannot be compared: {why}"):
            with_objects(value).union(with_objects(type(value)()))
        pieces = [DataProto.from_dict(meta_info={"limit": kind()}) for kind in (type(value), type(value))]
        with pytest.raises(ValueError, match=f"concat: meta_info limit: a {kind} cannot be compared"):
            DataProto.concat(pieces)
    with pytest.raises(NotComparable, match="a GivesArray and a int cannot be compared"):
        same_value(GivesArray(), 3)
    itself = Raises()
    assert same_value([itself], [itself])


@pytest.mark.parametrize("kind", ["array", "list", "dict"])
def test_what_contains_itself_has_a_digest(kind: str) -> None:
    assert digest(loops(kind)) == digest(loops(kind)) != digest(loops(kind, 1))
    assert digest(loops(kind, period=2)) != digest(loops(kind))  # ranks that make it alike have it alike


def test_what_has_no_end_is_refused_by_name_where_it_cannot_be_copied() -> None:
    endless = with_objects(loops("array"))
    with pytest.raises(
        ValueError, match="objects cannot be copied: nested too deeply, or an array that contains itself"
    ):
        endless.clone()
    assert endless.repeat(2)["objects"][0][0] is endless["objects"][0]
    for value in (loops("array"), nested(100_000, 0)):
        with pytest.raises(ValueError, match="meta_info deep cannot be copied"):
            DataProto(meta_info={"deep": value})
    in_a_graph = 2 * torch.ones(1, requires_grad=True)
    for uncopyable in (threading.Lock(), (number for number in range(3)), [sys], in_a_graph, {"file": sys.__stdout__}):
        with pytest.raises(ValueError, match=r"meta_info handle cannot be copied: \S"):
            DataProto(meta_info={"lr": 0.1, "handle": uncopyable})
        with pytest.raises(ValueError, match=r"objects cannot be copied: \S"):
            with_objects(uncopyable).clone()
    with pytest.raises(ValueError, match="cannot be pickled: it is nested too deeply"):
        digest(nested(100_000, 0))
    looped = DataProto(meta_info={"loop": loops("list")}).meta_info["loop"]
    assert looped[0] is looped
