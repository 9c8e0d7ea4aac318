"""What `load_batch` returns and how a micro-batch is processed: InternEvo's document to the letter, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.data import (
    ListSource,
    PackBatchSampler,
    PackedDataset,
    PackedLoader,
    data_process,
    load_accum_batch,
    load_accum_batches,
    load_batch,
    load_micro_batch,
    packed_data_normalizer,
    split_data_sequence_parallel,
    unpack_data,
)
from tests.data.test_build_pack import PACKED_SAMPLES, UNPACKED_SAMPLES

PACKED_IDS = [
    [2323, 442, 252, 341, 233, 3442, 322, 31, 2514, 49731, 51, 4326, 427, 465, 22, 314],
    [9725, 346, 1343, 24, 2562, 5, 25, 356, 0, 0, 0, 0, 0, 0, 0, 0],
]
PACKED_INDEXES = [
    [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4],
    [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7],
]
PACKED_LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, 427, 465, 22, 314, 9725],
    [346, 1343, -100, 2562, 5, 25, 356, -100, -100, -100, -100, -100, -100, -100, -100, -100],
]
SIZES = {"micro_bsz": 2, "seq_len": 8}


def loader(samples: list[list[int]], *, use_packed: bool = True, **sizes: int) -> PackedLoader:
    """All packs of the samples in one step."""
    dataset = PackedDataset(ListSource(samples), use_packed_dataset=use_packed, **sizes)  # type: ignore[arg-type]
    return PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=len(dataset)), prefetch=0)


def micro_batch(samples: list[list[int]], offset: int = 0) -> tuple[dict[str, Any], Tensor]:
    """An unprocessed micro-batch of groups of samples, micro_bsz 2 and seq_len 8."""
    (data, labels), _ = load_batch(loader(samples, use_packed=False, **SIZES))
    return load_micro_batch(data, labels, offset)


def test_load_batch_of_the_document() -> None:
    batch_data, actual_batch_size = load_batch(loader(PACKED_SAMPLES, **SIZES))
    assert isinstance(batch_data, list)
    assert set(batch_data[0]) == {"input_ids", "cu_seqlens", "indexes"}
    assert batch_data[0]["input_ids"].tolist() == PACKED_IDS
    assert isinstance(batch_data[0]["cu_seqlens"], list)
    assert [cu_seqlens.tolist() for cu_seqlens in batch_data[0]["cu_seqlens"]] == [[0, 4, 11, 16], [0, 3, 8, 16]]
    assert batch_data[0]["indexes"].tolist() == PACKED_INDEXES
    assert batch_data[1].tolist() == PACKED_LABELS
    assert actual_batch_size == 2
    assert batch_data[0]["input_ids"].dtype == batch_data[0]["indexes"].dtype == batch_data[1].dtype == torch.int64
    assert {cu_seqlens.dtype for cu_seqlens in batch_data[0]["cu_seqlens"]} == {torch.int32}


def test_load_batch_moves_all_but_cu_seqlens() -> None:
    (data, labels), _ = load_batch(loader(PACKED_SAMPLES, **SIZES), "meta")
    assert data["input_ids"].is_meta and data["indexes"].is_meta and labels.is_meta
    assert not data["cu_seqlens"][0].is_meta


def test_load_batch_takes_any_iterator_and_ends_with_it() -> None:
    pairs: Iterator[tuple[dict[str, Any], Tensor]] = iter([({"input_ids": torch.ones(3, 4)}, torch.ones(3, 4))])
    assert load_batch(pairs)[1] == 3
    with pytest.raises(StopIteration):
        load_batch(pairs)


def test_load_micro_batch_keeps_a_first_dimension_of_one() -> None:
    (data, labels), _ = load_batch(loader(PACKED_SAMPLES, **SIZES))
    micro_data, micro_labels = load_micro_batch(data, labels, 1)
    assert micro_data["input_ids"].tolist() == [PACKED_IDS[1]]
    assert [cu_seqlens.tolist() for cu_seqlens in micro_data["cu_seqlens"]] == [[0, 3, 8, 16]]
    assert micro_data["indexes"].tolist() == [PACKED_INDEXES[1]]
    assert micro_labels.tolist() == [PACKED_LABELS[1]]
    for offset in (2, -1):
        with pytest.raises(IndexError, match=f"micro-batch {offset} of 2"):
            load_micro_batch(data, labels, offset)


def test_packed_micro_batch_of_the_document() -> None:
    (batch, batch_labels), _ = load_batch(loader(PACKED_SAMPLES, **SIZES))
    data, labels = load_accum_batch(batch, batch_labels, 0, data_process(mode="mtp", **SIZES))
    assert set(data) == {"input_ids", "cu_seqlens", "indexes", "max_seqlen"}
    assert data["input_ids"].tolist() == [PACKED_IDS[0]]
    assert data["cu_seqlens"].tolist() == [0, 4, 11, 16]
    assert data["indexes"].tolist() == PACKED_INDEXES[0]
    assert (data["max_seqlen"], type(data["max_seqlen"])) == (7, int)
    assert labels.tolist() == [PACKED_LABELS[0]]
    # The batch is as it was, and its other micro-batch comes next.
    assert set(batch) == {"input_ids", "cu_seqlens", "indexes"}
    both = list(load_accum_batches([batch, batch_labels], data_process(**SIZES)))
    assert [micro_data["max_seqlen"] for micro_data, _ in both] == [7, 8]
    assert [micro_labels.tolist() for _, micro_labels in both] == [[row] for row in PACKED_LABELS]


@pytest.mark.parametrize(
    ("rank", "ids", "indexes", "expected_labels"),
    [
        (0, [2323, 442, 252, 341, 233, 3442, 322, 31],
         [0, 1, 2, 3, 0, 1, 2, 3], [442, 252, 341, -100, 3442, 322, 31, 2514]),
        (1, [2514, 49731, 51, 4326, 427, 465, 22, 314],
         [4, 5, 6, 0, 1, 2, 3, 4], [49731, 51, -100, 427, 465, 22, 314, 9725]),
    ],
)  # fmt: skip
def test_isp_split_of_the_document(rank: int, ids: list[int], indexes: list[int], expected_labels: list[int]) -> None:
    (batch, batch_labels), _ = load_batch(loader(PACKED_SAMPLES, **SIZES))
    process = data_process(mode="isp", sp_rank=rank, sp_size=2, **SIZES)
    data, labels = load_accum_batch(batch, batch_labels, 0, process)
    assert data["input_ids"].tolist() == [ids]
    assert data["indexes"].tolist() == indexes
    assert labels.tolist() == [expected_labels]
    assert data["cu_seqlens"].tolist() == [0, 4, 11, 16]
    assert data["max_seqlen"] == 7


def test_unpacked_micro_batch_of_the_document() -> None:
    data, labels = unpack_data(*micro_batch(UNPACKED_SAMPLES[:2]), **SIZES)
    assert set(data) == {"input_ids"}
    assert data["input_ids"].tolist() == [[2323, 442, 252, 341, 0, 0, 0, 0], [233, 3442, 322, 31, 2514, 49731, 51, 0]]
    assert labels.tolist() == [
        [442, 252, 341, -100, -100, -100, -100, -100],
        [3442, 322, 31, 2514, 49731, 51, -100, -100],
    ]


@pytest.mark.parametrize(
    ("rank", "ids", "expected_labels"),
    [
        (0, [[2323, 442, 252, 341], [233, 3442, 322, 31]], [[442, 252, 341, -100], [3442, 322, 31, 2514]]),
        (1, [[0, 0, 0, 0], [2514, 49731, 51, 0]], [[-100, -100, -100, -100], [49731, 51, -100, -100]]),
    ],
)
def test_isp_split_of_unpacked_rows_of_the_document(
    rank: int, ids: list[list[int]], expected_labels: list[list[int]]
) -> None:
    (batch, batch_labels), _ = load_batch(loader(UNPACKED_SAMPLES[:2], use_packed=False, **SIZES))
    process = data_process(use_packed_dataset=False, mode="isp", sp_rank=rank, sp_size=2, **SIZES)
    data, labels = load_accum_batch(batch, batch_labels, 0, process)
    assert set(data) == {"input_ids"}
    assert data["input_ids"].tolist() == ids
    assert labels.tolist() == expected_labels


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[1, 2]], [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),  # the padding is no row, even where it would fit
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 0]]),  # exactly a row of padding
        ([[1, 2, 3, 4, 5], [6, 7, 8, 9], [3, 3, 3, 3]], [[1, 2, 3, 4], [6, 7, 8, 9], [3, 3, 3, 3]]),  # no padding
    ],
)
def test_a_group_with_fewer_samples_has_empty_rows(samples: list[list[int]], expected: list[list[int]]) -> None:
    (data, labels), _ = load_batch(loader(samples, use_packed=False, micro_bsz=3, seq_len=4))
    unpacked, rows = unpack_data(*load_micro_batch(data, labels, 0), micro_bsz=3, seq_len=4)
    assert unpacked["input_ids"].tolist() == expected
    wanted = [
        [*row[1:4], -100] if 0 not in row else [2, -100, -100, -100] if row[0] else [-100] * 4 for row in expected
    ]
    assert rows.tolist() == wanted


def test_a_pack_of_padding_unpacks_to_empty_rows() -> None:
    dataset = PackedDataset(ListSource([[1]]), use_packed_dataset=False, micro_bsz=2, seq_len=8)
    sampler = PackBatchSampler(1, micro_num=1, dp_rank=1, dp_size=2)
    (batch, batch_labels), _ = load_batch(PackedLoader(dataset, sampler, prefetch=0))
    data, labels = load_accum_batch(batch, batch_labels, 0, data_process(use_packed_dataset=False, **SIZES))
    assert data["input_ids"].tolist() == [[0] * 8] * 2
    assert labels.tolist() == [[-100] * 8] * 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3), st.integers(1, 5))
def test_unpacked_rows_are_the_samples(lengths: list[int], micro_bsz: int, seq_len: int) -> None:
    samples = [[100 * row + token + 1 for token in range(length)] for row, length in enumerate(lengths)]
    batch_data, count = load_batch(loader(samples, use_packed=False, micro_bsz=micro_bsz, seq_len=seq_len))
    process = data_process(use_packed_dataset=False, micro_bsz=micro_bsz, seq_len=seq_len)
    ids, labels = [], []
    for data, micro_labels in load_accum_batches(batch_data, process):
        ids += data["input_ids"].tolist()
        labels += micro_labels.tolist()
    rows = [sample[:seq_len] for sample in samples]
    rows += [[]] * (count * micro_bsz - len(rows))
    assert ids == [row + [0] * (seq_len - len(row)) for row in rows]
    assert labels == [row[1:] + [-100] * (seq_len - len(row[1:])) for row in rows]


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_parts_of_the_sequence_make_the_whole(sp_size: int, part: int, use_packed: bool) -> None:
    seq_len = sp_size * part
    samples = [list(range(10, 10 + length)) for length in (3, 8, 1, 5)]
    sizes = {"micro_bsz": 2, "seq_len": seq_len}
    batch_data, _ = load_batch(loader(samples, use_packed=use_packed, **sizes))
    whole = list(load_accum_batches(batch_data, data_process(use_packed_dataset=use_packed, **sizes)))
    parts = [
        list(
            load_accum_batches(
                batch_data,
                data_process(use_packed_dataset=use_packed, mode="isp", sp_rank=rank, sp_size=sp_size, **sizes),
            )
        )
        for rank in range(sp_size)
    ]
    for number, (data, labels) in enumerate(whole):
        shares = [ranks[number] for ranks in parts]
        assert torch.equal(torch.cat([share[1] for share in shares], dim=1), labels)
        assert torch.equal(torch.cat([share[0]["input_ids"] for share in shares], dim=1), data["input_ids"])
        if use_packed:
            assert torch.equal(torch.cat([share[0]["indexes"] for share in shares]), data["indexes"])


@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
def test_other_modes_do_not_split(mode: Any) -> None:
    assert data_process(mode=mode, sp_rank=1, sp_size=3, **SIZES) == (packed_data_normalizer,)
    assert data_process(mode="isp", **SIZES) == (packed_data_normalizer,)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="16 tokens of a row do not split over 3 ranks of the sequence; 18 would fit"):
        data_process(mode="isp", sp_size=3, **SIZES)
    # Unpacked it is each row that is split, not the pack.
    with pytest.raises(ValueError, match="8 tokens of a row do not split over 16 ranks of the sequence; 16 would fit"):
        data_process(use_packed_dataset=False, mode="isp", sp_size=16, **SIZES)
    data = {"input_ids": torch.zeros(1, 10)}
    with pytest.raises(ValueError, match="10 tokens of a row do not split over 4 ranks of the sequence; 12 would fit"):
        split_data_sequence_parallel(data, torch.zeros(1, 10), sp_rank=0, sp_size=4)
    with pytest.raises(ValueError, match="sp_rank=2 is not one of sp_size=2 ranks"):
        split_data_sequence_parallel(data, torch.zeros(1, 10), sp_rank=2, sp_size=2)


def test_what_is_no_single_micro_batch_is_refused() -> None:
    (data, labels), _ = load_batch(loader(PACKED_SAMPLES, **SIZES))
    with pytest.raises(ValueError, match=r"expected one micro-batch of shape \[1, P\], got \[2, 16\]"):
        packed_data_normalizer(data, labels)
    with pytest.raises(ValueError, match=r"expected one micro-batch of shape \[1, P\], got \[2, 16\]"):
        unpack_data(data, labels, **SIZES)


def test_a_cut_pack_is_not_unpacked() -> None:
    (data, labels), _ = load_batch(loader(PACKED_SAMPLES, **SIZES))
    with pytest.raises(ValueError, match=r"no pack of build_unpack, micro_bsz=2, seq_len=8: cu_seqlens \[0, 4, 11, 16"):
        unpack_data(*load_micro_batch(data, labels, 0), **SIZES)
    (data, labels), _ = load_batch(loader([[1, 2], [3, 4], [5, 6]], micro_bsz=2, seq_len=8))
    with pytest.raises(ValueError, match=r"segments of \[2, 2, 2\] tokens do not fit into micro_bsz=2 rows of 8"):
        unpack_data(*load_micro_batch(data, labels, 0), **SIZES)
