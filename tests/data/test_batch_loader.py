"""InternEvo's document through the calls that it prints: every value of it, and what the calls refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.config import Mode
from roll.data import BatchLoader, ListSource, PackBatchSampler, PackedDataset, PackedLoader
from tests.data.test_build_pack import PACKED_SAMPLES, UNPACKED_SAMPLES
from tests.data.test_loading import PACKED_IDS, PACKED_INDEXES, PACKED_LABELS
from tests.rank_pool import RankPool

SIZES: dict[str, Any] = {"micro_bsz": 2, "seq_len": 8}
UNPACKED_LABELS = [
    [442, 252, 341, -100, 3442, 322, 31, 2514, 49731, 51, -100, -100, -100, -100, -100, -100],
    [427, 465, 22, 314, 9725, 346, 1343, -100, 2562, 5, 25, 356, 3145, 246, 25, -100],
    [2465, 562, 67, 26, 265, 21, 256, -100, 14, -100, -100, -100, -100, -100, -100, -100],
]
# What the document prints for tp rank 0 and 1: input_ids, indexes, label.
PACKED_PARTS = [
    (
        [[2323, 442, 252, 341, 233, 3442, 322, 31]],
        [0, 1, 2, 3, 0, 1, 2, 3],
        [[442, 252, 341, -100, 3442, 322, 31, 2514]],
    ),
    (
        [[2514, 49731, 51, 4326, 427, 465, 22, 314]],
        [4, 5, 6, 0, 1, 2, 3, 4],
        [[49731, 51, -100, 427, 465, 22, 314, 9725]],
    ),
]
UNPACKED_PARTS = [
    ([[2323, 442, 252, 341], [233, 3442, 322, 31]], [[442, 252, 341, -100], [3442, 322, 31, 2514]]),
    ([[0, 0, 0, 0], [2514, 49731, 51, 0]], [[-100, -100, -100, -100], [49731, 51, -100, -100]]),
]


def batches(samples: list[list[int]], *, packed: bool = True, micro_num: int = 2) -> Iterator[Any]:
    """The document's data_iter."""
    dataset = PackedDataset(ListSource(samples), use_packed_dataset=packed, **SIZES)
    return iter(PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=micro_num), prefetch=0))


class Scheduler(BatchLoader):
    """Calls the methods of itself, as InternEvo's schedulers do."""

    def micro_batches(self, data: dict[str, Any], label: Tensor) -> list[tuple[dict[str, Any], Tensor]]:
        return [self._load_accum_batch(data, label) for _ in range(len(label))]


def test_a_batch_of_the_document() -> None:
    engine = BatchLoader(**SIZES)
    batch_data, actual_batch_size = engine.load_batch(batches(PACKED_SAMPLES))
    assert isinstance(batch_data, list)
    assert batch_data[0].keys() == {"input_ids", "cu_seqlens", "indexes"}
    assert batch_data[0]["input_ids"].tolist() == PACKED_IDS
    assert [cu_seqlens.tolist() for cu_seqlens in batch_data[0]["cu_seqlens"]] == [[0, 4, 11, 16], [0, 3, 8, 16]]
    assert batch_data[0]["indexes"].tolist() == PACKED_INDEXES
    assert batch_data[1].tolist() == PACKED_LABELS
    assert actual_batch_size == 2


def test_micro_batches_of_the_document() -> None:
    scheduler = Scheduler(**SIZES)
    (data, label), _ = scheduler.load_batch(batches(PACKED_SAMPLES))
    (first, first_label), (second, second_label) = scheduler.micro_batches(data, label)
    assert first["input_ids"].tolist() == [PACKED_IDS[0]]
    assert first["cu_seqlens"].tolist() == [0, 4, 11, 16]
    assert first["indexes"].tolist() == PACKED_INDEXES[0]
    assert first["max_seqlen"] == 7
    assert first_label.tolist() == [PACKED_LABELS[0]]
    assert second["input_ids"].tolist() == [PACKED_IDS[1]]
    assert (second["cu_seqlens"].tolist(), second["max_seqlen"]) == ([0, 3, 8, 16], 8)
    assert second_label.tolist() == [PACKED_LABELS[1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_packed_parts_of_the_document(rank: int) -> None:
    engine = BatchLoader(mode="isp", sp_rank=rank, sp_size=2, **SIZES)
    (data, label), _ = engine.load_batch(batches(PACKED_SAMPLES))
    at_once = engine._load_accum_batch(data, label)

    # The same by hand, one call after the other.
    (data, label), _ = engine.load_batch(batches(PACKED_SAMPLES))
    whole, whole_label = engine.packed_data_normalizer(*engine._load_micro_batch(data, label))
    assert whole["indexes"].tolist() == PACKED_INDEXES[0]
    by_hand = engine.split_data_sequence_parallel(whole, whole_label)
    for part, part_label in (at_once, by_hand):
        assert (part["input_ids"].tolist(), part["indexes"].tolist(), part_label.tolist()) == PACKED_PARTS[rank]
        assert (part["cu_seqlens"].tolist(), part["max_seqlen"]) == ([0, 4, 11, 16], 7)


def test_unpacked_rows_of_the_document() -> None:
    engine = BatchLoader(use_packed_dataset=False, **SIZES)
    (data, label), actual_batch_size = engine.load_batch(batches(UNPACKED_SAMPLES, packed=False, micro_num=3))
    assert (actual_batch_size, label.tolist()) == (3, UNPACKED_LABELS)
    _data, _label = engine.unpack_data(*engine._load_micro_batch(data, label))
    assert _data.keys() == {"input_ids"}
    assert _data["input_ids"].tolist() == [[2323, 442, 252, 341, 0, 0, 0, 0], [233, 3442, 322, 31, 2514, 49731, 51, 0]]
    assert _label.tolist() == [[442, 252, 341, -100] + [-100] * 4, [3442, 322, 31, 2514, 49731, 51, -100, -100]]
    # The second pack, of a sample of 8 tokens and one of 13, of which 8 are kept.
    _data, _label = engine._load_accum_batch(data, label)
    assert _data["input_ids"].tolist() == [UNPACKED_SAMPLES[2], UNPACKED_SAMPLES[3][:8]]
    assert _label.tolist() == [UNPACKED_LABELS[1][:8], UNPACKED_LABELS[1][8:]]


@pytest.mark.parametrize("rank", [0, 1])
def test_unpacked_parts_of_the_document(rank: int) -> None:
    engine = BatchLoader(mode="isp", sp_rank=rank, sp_size=2, use_packed_dataset=False, **SIZES)
    (data, label), _ = engine.load_batch(batches(UNPACKED_SAMPLES[:2], packed=False, micro_num=1))
    _data, _label = engine._load_accum_batch(data, label)
    assert _data.keys() == {"input_ids"}
    assert (_data["input_ids"].tolist(), _label.tolist()) == UNPACKED_PARTS[rank]


def test_the_offset_is_the_objects_own() -> None:
    one, other = BatchLoader(**SIZES), BatchLoader(**SIZES)
    (data, label), _ = one.load_batch(batches(PACKED_SAMPLES))
    assert [one._load_accum_batch(data, label)[1].tolist() for _ in range(2)] == [[row] for row in PACKED_LABELS]
    assert other._load_accum_batch(data, label)[1].tolist() == [PACKED_LABELS[0]]
    assert (one.offset, other.offset) == (2, 1)
    with pytest.raises(IndexError, match="all 2 micro-batches of the batch are taken; load_batch begins the next"):
        one._load_accum_batch(data, label)
    assert one.offset == 2
    # A batch that cannot be loaded leaves the one before as it was; the next begins anew.
    with pytest.raises(StopIteration):
        other.load_batch(iter(()))
    assert other._load_micro_batch(data, label)[1].tolist() == [PACKED_LABELS[1]]
    (data, label), _ = other.load_batch(batches(PACKED_SAMPLES[::-1]))
    assert other._load_micro_batch(data, label)[0]["input_ids"][0, :5].tolist() == PACKED_SAMPLES[-1]


def test_batches_are_on_the_device() -> None:
    (data, label), _ = BatchLoader(device="meta", **SIZES).load_batch(batches(PACKED_SAMPLES))
    assert data["input_ids"].is_meta and data["indexes"].is_meta and label.is_meta


def parts_of_the_group() -> tuple[list[list[int]], list[int], list[list[int]]]:
    engine = BatchLoader(mode="isp", group=dist.group.WORLD, **SIZES)
    (data, label), _ = engine.load_batch(batches(PACKED_SAMPLES))
    part, part_label = engine._load_accum_batch(data, label)
    return part["input_ids"].tolist(), part["indexes"].tolist(), part_label.tolist()


def refusal_of_the_group() -> str:
    with pytest.raises(ValueError, match="sp_rank") as refused:
        BatchLoader(mode="isp", group=dist.group.WORLD, sp_size=2, **SIZES)
    return str(refused.value)


def test_a_group_says_which_part_is_this_ranks(ranks: RankPool) -> None:
    assert ranks.run(parts_of_the_group, world_size=2) == PACKED_PARTS
    message = "group has its own sp_rank and sp_size, but sp_rank=0, sp_size=2 came"
    assert ranks.run(refusal_of_the_group, world_size=2) == [message] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "ISP", "sp_size": 2}, "mode must be one of mtp, msp, fsp, isp; got 'ISP'"),
        ({"micro_bsz": 0}, "micro_bsz must be at least 1, got 0"),
        ({"seq_len": -8}, "seq_len must be at least 1, got -8"),
        ({"mode": "isp", "sp_rank": 2, "sp_size": 2}, "sp_rank=2 is not one of sp_size=2 ranks"),
        ({"mode": "isp", "sp_size": 3}, "16 tokens of a row do not split over 3 ranks"),
        ({"mode": "isp", "sp_size": 16, "use_packed_dataset": False}, "8 tokens of a row do not split over 16 ranks"),
    ],
)
def test_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchLoader(**SIZES | settings)


@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
def test_only_isp_splits_the_data(mode: Mode) -> None:
    engine = BatchLoader(mode=mode, sp_rank=1, sp_size=2, **SIZES)
    (data, label), _ = engine.load_batch(batches(PACKED_SAMPLES))
    whole, whole_label = engine._load_accum_batch(data, label)
    assert whole["input_ids"].tolist() == [PACKED_IDS[0]]
    message = f"mode {mode} takes the whole sequence to the embedding; only isp splits the data"
    with pytest.raises(ValueError, match=message):
        engine.split_data_sequence_parallel(whole, whole_label)
    one_rank = BatchLoader(mode="isp", **SIZES)
    assert torch.equal(one_rank.split_data_sequence_parallel(whole, whole_label)[1], whole_label)
