"""Packs: the rows of InternEvo's document to the letter, the cases it leaves open, and what holds for any samples."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.data import Pack, build_pack, build_unpack

PACKED_SAMPLES = [
    [2323, 442, 252, 341],
    [233, 3442, 322, 31, 2514, 49731, 51],
    [4326, 427, 465, 22, 314, 9725, 346, 1343],
    [24, 2562, 5, 25, 356],
]
UNPACKED_SAMPLES = [
    [2323, 442, 252, 341],
    [233, 3442, 322, 31, 2514, 49731, 51],
    [4326, 427, 465, 22, 314, 9725, 346, 1343],
    [24, 2562, 5, 25, 356, 3145, 246, 25, 1451, 67, 73, 541, 265],
    [4524, 2465, 562, 67, 26, 265, 21, 256, 145, 1345],
    [34, 14],
]

# Tokens that can be told apart: sample s, token t is 100 * s + t.
Lengths = st.lists(st.integers(0, 13), max_size=8)
Sizes = st.tuples(st.integers(1, 3), st.integers(1, 5))


def numbered(lengths: list[int]) -> list[list[int]]:
    return [[100 * sample + token for token in range(length)] for sample, length in enumerate(lengths)]


def ids(packs: list[Pack]) -> list[list[int]]:
    return [pack.input_ids.tolist() for pack in packs]


def labels(packs: list[Pack]) -> list[list[int]]:
    return [pack.labels.tolist() for pack in packs]


def cuts(packs: list[Pack]) -> list[list[int]]:
    return [pack.cu_seqlens.tolist() for pack in packs]


def positions(packs: list[Pack]) -> list[list[int]]:
    return [pack.indexes.tolist() for pack in packs]


def test_packed_rows_of_the_document() -> None:
    packs = build_pack(PACKED_SAMPLES, micro_bsz=2, seq_len=8)
    assert ids(packs) == [
        [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 4326, 427, 465, 22, 314],
        [9725, 346, 1343, 24, 2562, 5, 25, 356, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert labels(packs) == [
        [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, 427, 465, 22, 314, 9725],
        [346, 1343, -100, 2562, 5, 25, 356, -100, -100, -100, -100, -100, -100, -100, -100, -100],
    ]
    assert cuts(packs) == [[0, 4, 11, 16], [0, 3, 8, 16]]
    assert positions(packs) == [
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert [pack.num_tokens for pack in packs] == [16, 8]


def test_unpacked_rows_of_the_document() -> None:
    packs = build_unpack(UNPACKED_SAMPLES, micro_bsz=2, seq_len=8)
    assert ids(packs) == [
        [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 0, 0, 0, 0, 0],
        [4326, 427, 465, 22, 314, 9725, 346, 1343, 24, 2562, 5, 25, 356, 3145, 246, 25],
        [4524, 2465, 562, 67, 26, 265, 21, 256, 34, 14, 0, 0, 0, 0, 0, 0],
    ]
    assert labels(packs) == [
        [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, -100, -100, -100, -100, -100],
        [427, 465, 22, 314, 9725, 346, 1343, -100, 2562, 5, 25, 356, 3145, 246, 25, -100],
        [2465, 562, 67, 26, 265, 21, 256, -100, 14, -100, -100, -100, -100, -100, -100, -100],
    ]
    assert cuts(packs) == [[0, 4, 11, 16], [0, 8, 16], [0, 8, 10, 16]]
    assert positions(packs) == [
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2, 3, 4, 5],
    ]
    assert [pack.num_tokens for pack in packs] == [11, 16, 10]


def test_dtypes() -> None:
    for pack in [*build_pack([[1, 2]], micro_bsz=1, seq_len=3), *build_unpack([[1, 2]], micro_bsz=1, seq_len=3)]:
        assert pack.input_ids.dtype == pack.labels.dtype == pack.indexes.dtype == torch.int64
        assert pack.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize(
    ("samples", "expected_ids", "expected_labels", "expected_cuts"),
    [
        # A sample that ends with the pack has no label there, and the next pack begins with the next sample.
        ([[1, 2, 3, 4, 5, 6], [7, 8]], [[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]],
         [[2, 3, 4, 5, 6, -100], [8, -100, -100, -100, -100, -100]], [[0, 3, 6], [0, 2, 6]]),
        # A cut that leaves one token: a segment of one, whose only label is in the pack before.
        ([[1, 2], [3, 4, 5, 6, 7]], [[1, 2, 3, 4, 5, 6], [7, 0, 0, 0, 0, 0]],
         [[2, -100, 4, 5, 6, 7], [-100] * 6], [[0, 2, 5, 6], [0, 1, 6]]),
        # A sample over two packs and more: segments of seq_len, labels all through.
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]],
         [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [13, 0, 0, 0, 0, 0]],
         [[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [-100] * 6], [[0, 3, 6], [0, 3, 6], [0, 1, 6]]),
        # Empty samples anywhere are skipped.
        ([[], [1, 2, 3, 4, 5, 6], [], [], [7], []], [[1, 2, 3, 4, 5, 6], [7, 0, 0, 0, 0, 0]],
         [[2, 3, 4, 5, 6, -100], [-100] * 6], [[0, 3, 6], [0, 1, 6]]),
        # Token 0 is a label like any other; a negative id is a token, but no label.
        ([[5, 0, 0, 7], [-3, -4, 9, -2]], [[5, 0, 0, 7, 3, 4], [9, 2, 0, 0, 0, 0]],
         [[0, 0, 7, -100, -100, 9], [-100] * 6], [[0, 3, 4, 6], [0, 2, 6]]),
        ([], [], [], []),
        ([[], []], [], [], []),
    ],
)  # fmt: skip
def test_packed_by_hand(
    samples: list[list[int]],
    expected_ids: list[list[int]],
    expected_labels: list[list[int]],
    expected_cuts: list[list[int]],
) -> None:
    packs = build_pack(samples, micro_bsz=2, seq_len=3)
    assert ids(packs) == expected_ids
    assert labels(packs) == expected_labels
    assert cuts(packs) == expected_cuts


def test_a_chunk_is_split_from_where_it_begins_in_the_pack() -> None:
    # Two tokens, then eight of a sample of twelve: segments of 4 from its own first token, not from the pack's.
    packs = build_pack([[1, 2], list(range(10, 22))], micro_bsz=2, seq_len=4)
    assert cuts(packs) == [[0, 2, 6, 8], [0, 4, 6, 8]]
    assert positions(packs) == [[0, 1, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1, 0, 1]]
    assert labels(packs)[0] == [2, -100, 11, 12, 13, 14, 15, 16]


def test_drop_last_leaves_out_only_a_pack_that_is_not_full() -> None:
    assert ids(build_pack([[1, 2, 3], [4, 5]], micro_bsz=1, seq_len=2, drop_last=True)) == [[1, 2], [3, 4]]
    assert labels(build_pack([[1, 2, 3]], micro_bsz=1, seq_len=2, drop_last=True)) == [[2, 3]]
    assert ids(build_pack([[1, 2], [3, 4]], micro_bsz=1, seq_len=2, drop_last=True)) == [[1, 2], [3, 4]]
    assert build_pack([[1]], micro_bsz=1, seq_len=2, drop_last=True) == []


def test_a_short_last_group_and_empty_samples_unpacked() -> None:
    packs = build_unpack([[], [1, -2], [], [3], [4, 0, 5, 6], []], micro_bsz=2, seq_len=3)
    assert ids(packs) == [[1, 2, 3, 0, 0, 0], [4, 0, 5, 0, 0, 0]]
    assert labels(packs) == [[-100] * 6, [0, 5, -100, -100, -100, -100]]
    assert cuts(packs) == [[0, 2, 3, 6], [0, 3, 6]]


@pytest.mark.parametrize(("micro_bsz", "seq_len", "name"), [(0, 4, "micro_bsz"), (2, -1, "seq_len")])
def test_sizes_below_one_are_refused(micro_bsz: int, seq_len: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got"):
        build_pack([[1]], micro_bsz=micro_bsz, seq_len=seq_len)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got"):
        build_unpack([[1]], micro_bsz=micro_bsz, seq_len=seq_len)


@pytest.mark.parametrize("sample", [[1.5], ["a"], [[1], [2]], [True]])
def test_samples_that_are_no_integers_are_refused(sample: list[object]) -> None:
    with pytest.raises(ValueError, match="sample 1: tokens must be a flat list of integers"):
        build_pack([[1], sample], micro_bsz=1, seq_len=4)  # type: ignore[list-item]


@given(Lengths, Sizes)
def test_packs_are_the_stream(lengths: list[int], sizes: tuple[int, int]) -> None:
    samples = numbered(lengths)
    packs = build_pack(samples, micro_bsz=sizes[0], seq_len=sizes[1])
    length = sizes[0] * sizes[1]
    stream = list(chain(*samples))
    following = list(chain(*([*sample[1:], -100] for sample in samples if sample)))
    padding = -len(stream) % length
    assert list(chain(*ids(packs))) == stream + [0] * padding
    assert list(chain(*labels(packs))) == following + [-100] * padding
    assert sum(pack.num_tokens for pack in packs) == len(stream)
    full = build_pack(samples, micro_bsz=sizes[0], seq_len=sizes[1], drop_last=True)
    assert ids(full) == ids(packs)[: len(stream) // length]


@given(Lengths, Sizes)
def test_groups_are_the_samples_cut_to_size(lengths: list[int], sizes: tuple[int, int]) -> None:
    micro_bsz, seq_len = sizes
    samples = [sample[:seq_len] for sample in numbered(lengths) if sample]
    packs = build_unpack(numbered(lengths), micro_bsz=micro_bsz, seq_len=seq_len)
    groups = [samples[start : start + micro_bsz] for start in range(0, len(samples), micro_bsz)]
    assert len(packs) == len(groups)
    for pack, group in zip(packs, groups, strict=True):
        real = list(chain(*group))
        padding = micro_bsz * seq_len - len(real)
        assert pack.input_ids.tolist() == real + [0] * padding
        assert pack.labels.tolist() == list(chain(*([*s[1:], -100] for s in group))) + [-100] * padding
        assert pack.num_tokens == len(real)


@given(Lengths, Sizes, st.booleans())
def test_segments_cover_a_pack_and_positions_restart(
    lengths: list[int], sizes: tuple[int, int], use_packed: bool
) -> None:
    build = build_pack if use_packed else build_unpack
    for pack in build(numbered(lengths), micro_bsz=sizes[0], seq_len=sizes[1]):
        bounds = pack.cu_seqlens.tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(pack.input_ids) == sizes[0] * sizes[1]
        assert all(start < stop for start, stop in pairwise(bounds))
        assert pack.indexes.tolist() == list(chain(*(range(stop - start) for start, stop in pairwise(bounds))))
        for start, stop in pairwise(bounds):
            tokens = pack.input_ids[start:stop].tolist()
            if start < pack.num_tokens:  # one sample's tokens, without a gap, at most seq_len
                assert stop - start <= sizes[1]
                assert tokens == list(range(tokens[0], tokens[0] + stop - start))
            else:
                assert (start, stop) == (pack.num_tokens, len(pack.input_ids))
