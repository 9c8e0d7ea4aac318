"""DataProtoFuture: chunks and joins of what is not there yet are those of what arrives; the rest stays away."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.protocol import DataProto, DataProtoFuture
from tests.protocol.batches import assert_same, batch_of, rows_of


@dataclass(eq=False)
class Remote:
    """A reference as Ray has it: a method that makes a Future. It counts how often it is fetched."""

    value: Any
    fetched: int = 0

    def future(self) -> Future[Any]:
        self.fetched += 1
        made: Future[Any] = Future()
        made.set_result(self.value)
        return made


def remote_pieces(sizes: list[int]) -> tuple[DataProto, list[Remote]]:
    """Pieces of these sizes, each with a metric of its own, and what they are together."""
    begins = np.cumsum([0, *sizes])
    whole = batch_of(sum(sizes))
    pieces = []
    for number, size in enumerate(sizes):
        piece = whole[int(begins[number]) : int(begins[number]) + size]
        piece.meta_info["metrics"] = {"part": number}
        pieces.append(piece)
    return DataProto.concat(pieces), [Remote(piece) for piece in pieces]


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(SIZES, st.integers(1, 6), st.booleans())
def test_chunks_of_the_future_are_chunks_of_what_arrives(sizes: list[int], chunks: int, known: bool) -> None:
    whole, parts = remote_pieces(sizes)
    future = DataProtoFuture.concat(parts, sizes if known else None)
    assert future.num_rows == (sum(sizes) if known else None)
    pieces = future.chunk(chunks)
    assert not any(part.fetched for part in parts)
    arrived = [piece.get() for piece in pieces]
    assert [rows_of(piece) for piece in arrived] == [rows_of(piece) for piece in whole.chunk(chunks)]
    joined = DataProto.concat(arrived)
    assert sorted(joined.meta_info["metrics"]["part"]) == list(range(len(sizes)))
    assert_same(future.get(), whole)
    assert_same(DataProto.materialize_concat(parts), whole)


@given(SIZES, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_chunks_of_chunks_and_joins_of_chunks(sizes: list[int], chunks: int, again: int, known: bool) -> None:
    whole, parts = remote_pieces(sizes)
    pieces = DataProtoFuture.concat(parts, sizes if known else None).chunk(chunks)
    joined = DataProtoFuture.concat(pieces).get()
    assert rows_of(joined) == rows_of(whole)
    assert sorted(joined.meta_info["metrics"]["part"]) == list(range(len(sizes)))
    for piece, expected in zip(pieces, whole.chunk(chunks), strict=True):
        smaller = [rows_of(part.get()) for part in piece.chunk(again)]
        assert smaller == [rows_of(part) for part in expected.chunk(again)]


def test_only_the_parts_that_a_chunk_needs_are_fetched() -> None:
    _, parts = remote_pieces([4, 4, 4, 4])
    shares = DataProtoFuture.concat(parts, sizes=[4, 4, 4, 4]).chunk(2)
    assert rows_of(shares[1].get()) == list(range(8, 16))
    assert [part.fetched for part in parts] == [0, 0, 1, 1]
    assert shares[1].num_rows == 8
    uneven = DataProtoFuture.concat(parts, sizes=[4, 4, 4, 4]).chunk(3)
    assert rows_of(uneven[1].get()) == list(range(6, 11))
    assert [part.fetched for part in parts] == [0, 1, 2, 1]


def test_a_part_that_is_needed_twice_is_fetched_once() -> None:
    _, parts = remote_pieces([4])
    first, second = DataProtoFuture.concat(parts).chunk(2)
    assert rows_of(DataProtoFuture.concat([second, first]).get()) == [2, 3, 0, 1]
    assert parts[0].fetched == 1


def test_a_future_travels_as_its_references_travel() -> None:
    _, parts = remote_pieces([2, 2])
    share = pickle.loads(pickle.dumps(DataProtoFuture.concat(parts, sizes=[2, 2]).chunk(2)[1]))
    assert rows_of(share.get()) == [2, 3]


def test_one_reference_is_joined_like_many() -> None:
    whole, (part,) = remote_pieces([3])
    assert_same(DataProto.materialize_concat(part), whole)
    assert DataProto.materialize_concat(part).meta_info["metrics"] == {"part": [0]}


def failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def test_a_failed_part_is_raised_at_once() -> None:
    _, parts = remote_pieces([2])
    with pytest.raises(ArithmeticError, match="on rank 1"):
        DataProtoFuture.concat([Future(), failed(ArithmeticError("on rank 1")), *parts]).get()


def test_a_late_part_is_named() -> None:
    _, parts = remote_pieces([2, 2])
    future = DataProtoFuture.concat([parts[0], Future(), parts[1], Future()])
    for get in (future.get, future.chunk(2)[0].get):
        with pytest.raises(TimeoutError, match=r"2 of 4 parts did not arrive in \d+\.\d s: number \[1, 3\]"):
            get(timeout=0.05)
    with pytest.raises(TimeoutError, match="1 of 1 parts"):
        DataProto.materialize_concat([Future()], timeout=0.05)


@pytest.mark.parametrize(
    ("references", "sizes", "message"),
    [
        ([], None, "at least one reference"),
        ([1], None, "reference 0 is a int, neither a Future"),
        ([Future(), batch_of(1)], None, "reference 1 is a DataProto, neither a Future"),
        ([Future()], [1, 2], r"1 references with sizes \[1, 2\]"),
        ([Future()], [-1], r"1 references with sizes \[-1\]"),
    ],
)
def test_what_is_no_future_is_refused(references: list[Any], sizes: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProtoFuture.concat(references, sizes)


@given(SIZES, st.integers(1, 4), st.booleans())
def test_the_stub_and_the_fields_are_known_without_fetching(sizes: list[int], chunks: int, known: bool) -> None:
    whole, parts = remote_pieces(sizes)
    future = DataProtoFuture.concat(parts, sizes if known else None, [part.value[:0] for part in parts])
    chosen = future.select(["name", "score"])
    pieces = [DataProtoFuture.concat([piece]) for piece in chosen.chunk(chunks)]
    stubs = [one.stub() for one in (future, chosen, *pieces)]
    with pytest.raises(ValueError, match="the batch lacks ids; it has name, score"):
        pieces[-1].select(["ids"])
    assert not any(part.fetched for part in parts)
    for one, stub in zip((future, chosen, *pieces), stubs, strict=True):
        assert_same(stub, one.get().stub())
    assert_same(stubs[0], whole.stub())
    assert_same(chosen.get(), whole.select(["score"], ["name"]))
    assert rows_of(DataProto.concat([piece.get() for piece in future.chunk(chunks)])) == rows_of(whole)


def test_what_is_not_known_of_remote_rows() -> None:
    _, parts = remote_pieces([2, 2])
    without = DataProtoFuture.concat(parts, sizes=[2, 2])
    with pytest.raises(ValueError, match="only if it is made with heads"):
        DataProtoFuture.concat([without]).stub()
    with pytest.raises(ValueError, match="the batch lacks other; it has ids, name, score"):
        without.select(["other"]).get()
    other = DataProto(meta_info={"step": 4, "tags": ["a"]})
    with pytest.raises(ValueError, match="meta_info step is 3 in piece 0, 4 in piece 1"):
        DataProtoFuture.concat(parts, heads=[batch_of(0), other]).stub()
    with pytest.raises(ValueError, match="2 references with 1 heads"):
        DataProtoFuture.concat(parts, heads=[batch_of(0)])


def test_what_arrives_is_checked() -> None:
    _, parts = remote_pieces([2, 2])
    with pytest.raises(ValueError, match="part 1 is a list, not a DataProto"):
        DataProtoFuture.concat([parts[0], Remote([1])]).get()
    with pytest.raises(ValueError, match="part 1 has 2 rows, not 3 as was said"):
        DataProtoFuture.concat(parts, sizes=[2, 3]).get()
    other = Remote(DataProto.from_dict({"x": torch.zeros(1)}))
    with pytest.raises(ValueError, match="is not in both piece 0 and piece 1"):
        DataProtoFuture.concat([parts[0], other]).get()
    for chunks in (0, -1):
        for future in (DataProtoFuture.concat(parts), DataProtoFuture.concat(parts, sizes=[2, 2])):
            with pytest.raises(ValueError, match="chunks of at least 1"):
                future.chunk(chunks)
