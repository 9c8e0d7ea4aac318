"""Batches for the tests of DataProto: rows that tell their number in every field, and batches of any kind."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from roll.protocol import DataProto, LossNormalizers, MicroBatchPlan
from roll.protocol.equality import same_value

PLAN = MicroBatchPlan(rows=((0, 2), (1, 3)), shares=(((0,), (1,)), ((1,), (0,))))
NORMALIZERS = LossNormalizers(tokens=9, sequences=4)
META = {"step": 3, "tags": ["a"]}


def batch_of(count: int, **fields: Any) -> DataProto:
    """Rows whose tensors and objects all tell the row number."""
    numbers = torch.arange(count)
    tensors = {"ids": numbers.unsqueeze(1) * 10 + torch.arange(3), "score": numbers.float()}
    data = DataProto.from_dict(tensors, {"name": [f"row {i}" for i in range(count)]}, META)
    return dataclasses.replace(data, **fields)


def rows_of(data: DataProto) -> list[int]:
    """The row numbers, read from every field."""
    numbers: list[int] = data["score"].int().tolist()
    assert data["ids"].tolist() == [[10 * i, 10 * i + 1, 10 * i + 2] for i in numbers]
    assert list(data["name"]) == [f"row {i}" for i in numbers]
    assert {name: value for name, value in data.meta_info.items() if name != "metrics"} == META
    assert len(data) == len(numbers)
    data.check_consistency()
    return numbers


def content(data: DataProto) -> dict[str, Any]:
    """Everything that a batch says, to be compared."""
    fields = {name: getattr(data, name) for name in ("tensors", "non_tensor_batch", "meta_info", "plan", "normalizers")}
    return {"rows": len(data), "is stub": data.batch is None, **fields}


def assert_same(ours: DataProto, theirs: DataProto) -> None:
    """Equal in rows, names and their order, dtypes, values, objects and meta data."""
    a, b = content(ours), content(theirs)
    assert same_value(a, b), f"{ours!r} is not {theirs!r}"
    assert list(ours.to_dict()) == list(theirs.to_dict())


TENSORS = {
    "float": lambda n: torch.tensor([float("nan"), 1.5, -0.0, float("inf"), 7.0, 8.0, 9.0])[:n],
    "bfloat": lambda n: torch.arange(n * 2).view(n, 2).to(torch.bfloat16),
    "bool": lambda n: torch.arange(n) % 2 == 0,
    "byte": lambda n: torch.arange(n, dtype=torch.uint8).view(n, 1),
    "wide": lambda n: torch.arange(n * 6).view(n, 2, 3).transpose(1, 2),
    "nothing": lambda n: torch.zeros(n, 0),
    "complex": lambda n: torch.complex(torch.arange(n).float(), torch.ones(n)).conj(),
}
OBJECTS = {
    "text": lambda n: [f"row {i}" for i in range(n)],
    "lists": lambda n: [[i] * 2 for i in range(n)],
    "arrays": lambda n: [np.arange(i) for i in range(n)],
    "mixed": lambda n: [None, 1, "a", {"k": [1]}, 2.5, (1,), b"b"][:n],
}


@st.composite
def batches(draw: st.DrawFn, rows: st.SearchStrategy[int] = st.integers(0, 7)) -> DataProto:  # noqa: B008
    """Any kinds of fields, any number of rows, with and without metrics; no batch at all is among them."""
    count = draw(rows)
    chosen = draw(st.lists(st.sampled_from(sorted({**TENSORS, **OBJECTS})), unique=True))
    meta: dict[str, Any] = draw(st.sampled_from([{}, META, {**META, "metrics": {"loss": [0.5, 1.5], "kl": 2.0}}]))
    tensors = {name: TENSORS[name](count) for name in chosen if name in TENSORS}
    objects = {name: OBJECTS[name](count) for name in chosen if name in OBJECTS}
    return DataProto.from_dict(tensors, objects, meta)
