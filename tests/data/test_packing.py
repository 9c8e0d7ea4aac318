"""Packing and unpacking, worked out by hand and against loops over rows and columns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.data.packing import PackedRows, pack_rows


def rows_of(*texts: str) -> tuple[Tensor, Tensor]:
    """Input ids and mask; `.` is padding, which holds the id 99 that must not appear in a packed row."""
    cells = [text.split() for text in texts]
    ids = torch.tensor([[99 if cell == "." else int(cell) for cell in row] for row in cells])
    mask = torch.tensor([[int(cell != ".") for cell in row] for row in cells])
    return ids, mask


def contents(rows: PackedRows) -> tuple[list[int], list[int], list[int]]:
    return rows.input_ids[0].tolist(), rows.position_ids[0].tolist(), rows.cu_seqlens.tolist()


@st.composite
def padded_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Rows of one run of real tokens each, or of none; distinct ids, so that each token can be told apart."""
    width = draw(st.integers(1, 6))
    runs = draw(st.lists(st.tuples(st.integers(0, width), st.integers(0, width)), max_size=5))
    ids = torch.arange(1, len(runs) * width + 1).view(len(runs), width)
    mask = torch.zeros_like(ids)
    for row, (one, other) in enumerate(runs):
        mask[row, min(one, other) : max(one, other)] = 1
    return ids, mask


def test_the_documented_example() -> None:
    ids, mask = rows_of(". . 5 6", "7 8 9 .")
    rows = pack_rows(ids, mask, multiple_of=4)
    assert contents(rows) == ([5, 6, 7, 8, 9, 0, 0, 0], [0, 1, 0, 1, 2, 0, 1, 2], [0, 2, 5, 8])
    assert (rows.num_tokens, rows.max_seqlen) == (5, 3)
    assert rows.next_tokens(ids).tolist() == [6, 0, 8, 9, 0, 0, 0, 0]
    # Token 5 stands in column 2 and speaks of column 3, so what was computed there (1) stands at index 2.
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert rows.unpack_next(values).tolist() == [[0, 0, 1], [3, 4, 0]]


def test_shapes_and_dtypes() -> None:
    ids, mask = rows_of("1 2 .", ". 3 4")
    rows = pack_rows(ids, mask)
    assert rows.input_ids.shape == rows.position_ids.shape == (1, 4)
    assert rows.input_ids.dtype == rows.position_ids.dtype == torch.int64
    assert (rows.cu_seqlens.dtype, rows.cu_seqlens.device.type) == (torch.int32, "cpu")
    assert rows.mask.dtype == torch.bool


@pytest.mark.parametrize(
    ("texts", "multiple_of", "ids", "positions", "cu_seqlens"),
    [
        (["1 2 3"], 1, [1, 2, 3], [0, 1, 2], [0, 3]),  # a full row
        (["1 2 3"], 3, [1, 2, 3], [0, 1, 2], [0, 3]),  # nothing to fill up
        (["1 2 3"], 2, [1, 2, 3, 0], [0, 1, 2, 0], [0, 3, 4]),
        ([". 7 ."], 1, [7], [0], [0, 1]),  # a row of one token
        ([". 7 .", "8 . ."], 4, [7, 8, 0, 0], [0, 0, 0, 1], [0, 1, 2, 4]),
        (["1 2", ". .", "3 4"], 1, [1, 2, 3, 4], [0, 1, 0, 1], [0, 2, 4]),  # an empty row makes no segment
        ([". .", ". ."], 1, [0], [0], [0, 1]),  # no real token at all
        ([". .", ". ."], 4, [0, 0, 0, 0], [0, 1, 2, 3], [0, 4]),
    ],
)
def test_packed_by_hand(
    texts: list[str], multiple_of: int, ids: list[int], positions: list[int], cu_seqlens: list[int]
) -> None:
    assert contents(pack_rows(*rows_of(*texts), multiple_of=multiple_of)) == (ids, positions, cu_seqlens)


def test_an_empty_micro_batch_unpacks_to_zeros() -> None:
    ids, mask = rows_of(". . .", ". . .")
    rows = pack_rows(ids, mask, multiple_of=2)
    values = torch.tensor([3.0, 4.0], requires_grad=True)
    unpacked = rows.unpack_next(values)
    assert unpacked.tolist() == [[0, 0], [0, 0]]
    assert rows.next_tokens(ids).tolist() == [0, 0]
    unpacked.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0]


def test_a_batch_without_rows() -> None:
    ids = torch.zeros(0, 3, dtype=torch.long)
    rows = pack_rows(ids, ids, multiple_of=2)
    assert contents(rows) == ([0, 0], [0, 1], [0, 2])
    assert rows.unpack_next(torch.ones(2)).shape == (0, 2)


def test_what_is_not_used_may_be_anything() -> None:
    # The last token of a row and the filling speak of nothing: neither value nor gradient comes from them.
    rows = pack_rows(*rows_of("1 2 .", ". 3 4"), multiple_of=8)
    nan = math.nan
    values = torch.tensor([1.0, nan, 3.0, nan, nan, nan, nan, nan], requires_grad=True)
    unpacked = rows.unpack_next(values)
    assert unpacked.tolist() == [[1, 0], [0, 3]]
    (unpacked * torch.tensor([[2.0, 5.0], [5.0, 7.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2, 0, 7, 0, 0, 0, 0, 0]


def test_input_is_not_changed() -> None:
    ids, mask = rows_of("1 2 .", ". 3 4")
    kept = ids.clone(), mask.clone()
    rows = pack_rows(ids, mask, multiple_of=8)
    rows.next_tokens(ids)
    values = torch.arange(8.0)
    rows.unpack_next(values)
    assert torch.equal(ids, kept[0])
    assert torch.equal(mask, kept[1])
    assert torch.equal(values, torch.arange(8.0))


@given(padded_rows(), st.integers(1, 5))
def test_packing_is_what_a_loop_packs(case: tuple[Tensor, Tensor], multiple_of: int) -> None:
    ids, mask = case
    tokens: list[int] = []
    positions: list[int] = []
    following: list[int] = []
    starts: list[int] = []
    for row in range(len(ids)):
        real = [int(ids[row, column]) for column in range(ids.shape[1]) if mask[row, column]]
        if real:
            starts.append(len(tokens))
        tokens += real
        positions += list(range(len(real)))
        following += [*real[1:], 0] if real else []
    filling = 0
    while (len(tokens) + filling) % multiple_of or len(tokens) + filling == 0:
        filling += 1
    if filling:
        starts.append(len(tokens))

    rows = pack_rows(ids, mask, multiple_of=multiple_of)
    assert rows.num_tokens == len(tokens)
    assert rows.input_ids[0].tolist() == tokens + [0] * filling
    assert rows.position_ids[0].tolist() == positions + list(range(filling))
    assert rows.cu_seqlens.tolist() == [*starts, len(tokens) + filling]
    assert rows.next_tokens(ids).tolist() == following + [0] * filling


@given(padded_rows(), st.integers(1, 5))
def test_unpacked_values_stand_where_their_token_stood(case: tuple[Tensor, Tensor], multiple_of: int) -> None:
    ids, mask = case
    rows = pack_rows(ids, mask, multiple_of=multiple_of)
    # Each packed token's value is its own id, which is unique, and -1 on the filling.
    values = torch.where(rows.input_ids[0] == 0, -1, rows.input_ids[0]).double()
    expected = [
        [float(ids[b, t]) if mask[b, t] and mask[b, t + 1] else 0.0 for t in range(ids.shape[1] - 1)]
        for b in range(len(ids))
    ]
    unpacked = rows.unpack_next(values)
    assert unpacked.shape == (len(ids), ids.shape[1] - 1)
    assert unpacked.tolist() == expected
    # The next token at each place is the column to the right, wherever there is a value.
    targets = rows.unpack_next(rows.next_tokens(ids).double())
    assert torch.equal(targets, torch.where(unpacked != 0, ids[:, 1:].double(), 0.0))


@given(padded_rows(), st.integers(1, 5), st.integers(0, 3))
def test_gradients_return_to_the_token_they_came_from(case: tuple[Tensor, Tensor], multiple_of: int, seed: int) -> None:
    ids, mask = case
    rows = pack_rows(ids, mask, multiple_of=multiple_of)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(len(ids), ids.shape[1] - 1, generator=generator, dtype=torch.float64)
    values = torch.zeros(rows.input_ids.shape[1], dtype=torch.float64, requires_grad=True)
    (rows.unpack_next(values) * weights).sum().backward()
    expected = []
    for b in range(len(ids)):
        for t in range(ids.shape[1]):
            if mask[b, t]:
                counts = t + 1 < ids.shape[1] and bool(mask[b, t + 1])
                expected.append(float(weights[b, t]) if counts else 0.0)
    assert values.grad is not None
    assert values.grad.tolist() == expected + [0.0] * (len(values) - len(expected))
