"""The dataset: the packs that the builders make, read in any order, from any source, shuffled by seed and epoch."""

from __future__ import annotations

import pickle
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.data import ListSource, Pack, PackedDataset, Sample, TokenizedFolder, build_pack, build_unpack
from roll.data.sources.sample import Ids
from roll.data.sources.tokenized_folder import write_tokenized


class CountingSource:
    """Samples of given lengths, made when asked for; it knows which were."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = np.array(lengths)
        self.read: list[int] = []

    @property
    def lengths(self) -> Ids:
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        return Sample.from_signed([100 * index + token for token in range(self._lengths[index])], f"sample {index}")


def samples(lengths: list[int]) -> list[list[int]]:
    return [[100 * sample + token + 1 for token in range(length)] for sample, length in enumerate(lengths)]


def equal(one: Pack, other: Pack) -> bool:
    return one.num_tokens == other.num_tokens and all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("input_ids", "labels", "cu_seqlens", "indexes")
    )


def tokens(dataset: PackedDataset) -> list[int]:
    """Real tokens of an epoch in the order of its packs."""
    return list(
        chain(*(dataset[index].input_ids[: dataset[index].num_tokens].tolist() for index in range(len(dataset))))
    )


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_pack_is_the_one_that_the_builder_makes(
    lengths: list[int], micro_bsz: int, seq_len: int, use_packed: bool, random: object
) -> None:
    rows = samples(lengths)
    build = build_pack if use_packed else build_unpack
    expected = build(rows, micro_bsz=micro_bsz, seq_len=seq_len)
    dataset = PackedDataset(
        ListSource(rows), micro_bsz=micro_bsz, seq_len=seq_len, use_packed_dataset=use_packed, vocab_size=10_000
    )
    assert len(dataset) == len(expected)
    assert dataset.num_tokens == sum(pack.num_tokens for pack in expected)
    order = list(range(len(dataset)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert all(equal(dataset[index], expected[index]) for index in order)


def test_packing_is_the_default_and_iteration_ends() -> None:
    dataset = PackedDataset(ListSource([[1, 2, 3], [4, 5]]), micro_bsz=2, seq_len=2)
    assert [pack.input_ids.tolist() for pack in dataset] == [[1, 2, 3, 4], [5, 0, 0, 0]]  # type: ignore[attr-defined]
    with pytest.raises(IndexError, match="pack 2 of 2"):
        dataset[2]


def test_nothing_is_read_but_what_a_pack_holds() -> None:
    source = CountingSource([3, 0, 4, 2, 50])
    dataset = PackedDataset(source, micro_bsz=1, seq_len=4)
    assert source.read == []
    dataset[1]  # tokens 4..7: the rest of sample 2, the first of sample 3
    assert source.read == [2, 3]
    source.read.clear()
    dataset[5]
    assert source.read == [4]


@pytest.mark.parametrize("use_packed", [True, False])
def test_a_shuffle_follows_from_seed_and_epoch(use_packed: bool) -> None:
    rows = samples([3] * 20)

    def shuffled(seed: int | None, epoch: int) -> PackedDataset:
        source = ListSource(rows)
        return PackedDataset(
            source, micro_bsz=2, seq_len=4, use_packed_dataset=use_packed, seed=seed, epoch=epoch, vocab_size=5000
        )

    first = tokens(shuffled(7, 0))
    assert tokens(shuffled(7, 0)) == first
    assert len({tuple(tokens(shuffled(seed, epoch))) for seed in (7, 8) for epoch in (0, 1)}) == 4
    assert sorted(first) == sorted(chain(*rows)) != first
    later = shuffled(7, 0).at_epoch(3)
    assert (later.epoch, tokens(later)) == (3, tokens(shuffled(7, 3)))
    assert later.identity() == shuffled(7, 0).identity()
    plain = shuffled(None, 0)
    assert tokens(plain) == tokens(plain.at_epoch(4)) == list(chain(*rows))
    # Samples stay whole: each is three tokens in a row.
    assert [[a + 1, a + 2] for a in first[::3]] == [list(pair) for pair in zip(first[1::3], first[2::3], strict=True)]


def test_at_epoch_keeps_every_setting(tmp_path: Path) -> None:
    write_tokenized(tmp_path / "a.bin", samples([5, 6, 7]))
    dataset = PackedDataset(
        TokenizedFolder(tmp_path), micro_bsz=2, seq_len=2, drop_last=True, seed=3, vocab_size=150, context_length=4
    )
    later = dataset.at_epoch(1)
    assert later.identity() == dataset.identity() | {"num_packs": 4, "num_tokens": 16, "drop_last": True}
    with pytest.raises(ValueError, match=r"a\.bin line \d: token \d has id \d+, outside the vocabulary of 150"):
        tokens(later)
    copy = pickle.loads(pickle.dumps(PackedDataset(TokenizedFolder(tmp_path), micro_bsz=2, seq_len=2, seed=3)))
    assert tokens(copy) == tokens(PackedDataset(TokenizedFolder(tmp_path), micro_bsz=2, seq_len=2, seed=3))


def test_a_pack_of_padding_has_nothing_to_learn() -> None:
    pack = PackedDataset(ListSource([[1]]), micro_bsz=2, seq_len=2).padding()
    assert (pack.input_ids.tolist(), pack.labels.tolist(), pack.num_tokens) == ([0] * 4, [-100] * 4, 0)
    assert (pack.cu_seqlens.tolist(), pack.indexes.tolist()) == ([0, 4], [0, 1, 2, 3])


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read() -> None:
    dataset = PackedDataset(ListSource([[1, 2], [3, -99]]), micro_bsz=1, seq_len=2, vocab_size=99)
    assert dataset[0].input_ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="sample 1: token 1 has id 99, outside the vocabulary of 99"):
        dataset[1]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "the dataset is empty: 0 samples hold no token"),
        ([[], []], {}, "the dataset is empty: 2 samples hold no token"),
        ([[]], {"use_packed_dataset": False}, "the dataset is empty: 1 samples hold no token"),
        ([[1, 2], [3]], {"drop_last": True}, r"3 tokens, not one pack of micro_bsz \* seq_len = 2 \* 4 = 8"),
        ([[1]], {"context_length": 3}, "seq_len=4 is over the model's context of 3 tokens"),
        ([[1]], {"seed": -1}, "seed must not be negative, got -1"),
        ([[1]], {"drop_last": True, "use_packed_dataset": False}, "use_packed_dataset=False pads every pack"),
        ([[1]], {"micro_bsz": 0}, "micro_bsz must be at least 1, got 0"),
    ],
)
def test_what_is_refused_at_the_start(rows: list[list[int]], settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedDataset(ListSource(rows), **{"micro_bsz": 2, "seq_len": 4} | settings)  # type: ignore[arg-type]
