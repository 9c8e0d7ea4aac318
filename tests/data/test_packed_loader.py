"""The loader: batches from a worker process are those made here, and its state is of what was taken."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.data import DataError, ListSource, PackBatchSampler, PackedDataset, PackedLoader, RampUp, Sample
from roll.data.sources.sample import Ids


class ProcessSource:
    """Samples of one token each: the id of the process that reads them."""

    @property
    def lengths(self) -> Ids:
        return np.ones(4, dtype=np.int64)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        return Sample.from_signed([os.getpid()], "here")


def loader(
    *, prefetch: int, dp_rank: int = 0, dp_size: int = 1, epochs: int | None = 3, **settings: Any
) -> PackedLoader:
    """Eleven samples of 31 tokens in packs of six."""
    samples = [[100 * row + token + 1 for token in range(row % 5 + 1)] for row in range(11)]
    names = {"vocab_size": 5000, "seed": 5} | settings
    dataset = PackedDataset(ListSource(samples), micro_bsz=2, seq_len=names.pop("seq_len", 3), **names)
    ramp_up = RampUp(1, 1, 2)
    sampler = PackBatchSampler(
        len(dataset), micro_num=2, dp_rank=dp_rank, dp_size=dp_size, ramp_up=ramp_up, epochs=epochs
    )
    return PackedLoader(dataset, sampler, prefetch=prefetch)


def flat(batch: tuple[dict[str, Any], Tensor]) -> list[Any]:
    data, labels = batch
    cu_seqlens = [one.tolist() for one in data["cu_seqlens"]]
    return [data["input_ids"].tolist(), cu_seqlens, data["indexes"].tolist(), labels.tolist()]


def test_the_worker_makes_what_is_made_here() -> None:
    here = loader(prefetch=0)
    assert here.remaining_steps() == 10
    made_here = [flat(batch) for batch in here]
    assert len(made_here) == 10
    ahead = loader(prefetch=3)
    assert [flat(batch) for batch in ahead] == made_here
    assert ahead.state_dict() == here.state_dict()
    assert ahead.remaining_steps() == 0
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_epoch_is_shuffled_anew(prefetch: int) -> None:
    made = loader(prefetch=prefetch)
    rows: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for data, _ in made:
        rows[made.position.epoch] += [row for row in data["input_ids"].tolist() if any(row)]
    assert rows == {
        epoch: [pack.input_ids.tolist() for pack in made.dataset.at_epoch(epoch)]  # type: ignore[attr-defined]
        for epoch in range(3)
    }
    assert rows[0] != rows[1] != rows[2]


def test_batches_are_made_in_another_process() -> None:
    def reader(prefetch: int) -> int:
        dataset = PackedDataset(ProcessSource(), micro_bsz=1, seq_len=1)
        made = PackedLoader(dataset, PackBatchSampler(4, micro_num=1), prefetch=prefetch)
        return int(next(made)[0]["input_ids"])

    assert reader(0) == os.getpid()
    assert reader(1) != os.getpid()


@pytest.mark.parametrize("stopped", range(10))
def test_resume_at_any_step_continues_the_same_stream(stopped: int) -> None:
    whole = [flat(batch) for batch in loader(prefetch=0)]
    first = loader(prefetch=0)
    for _ in range(stopped):
        next(first)
    again = loader(prefetch=0)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.remaining_steps() == 10 - stopped
    assert [flat(batch) for batch in again] == whole[stopped:]


def test_the_state_is_of_what_was_taken_not_of_what_was_made_ahead() -> None:
    whole = [flat(batch) for batch in loader(prefetch=0)]
    ahead = loader(prefetch=6)
    for _ in range(2):
        next(ahead)
    state = ahead.state_dict()
    assert state["position"] == {"epoch": 0, "pack": 2, "step": 2}
    again = loader(prefetch=6)
    again.load_state_dict(state)
    assert flat(next(again)) == whole[2]
    # A loader under way can be set back: what its worker has made ahead is dropped.
    ahead.load_state_dict(state | {"position": {"epoch": 0, "pack": 0, "step": 0}})
    assert flat(next(ahead)) == whole[0]


def test_two_ranks_share_what_one_would_take() -> None:
    one = [flat(batch) for batch in loader(prefetch=0, epochs=1)]
    ranks = [[flat(batch) for batch in loader(prefetch=0, epochs=1, dp_rank=rank, dp_size=2)] for rank in range(2)]
    rows = [row for batch in one for row in batch[0] if any(row)]
    dealt = [row for step in zip(*ranks, strict=True) for batch in step for row in batch[0] if any(row)]
    assert dealt == rows


def test_how_full_packs_are() -> None:
    made = loader(prefetch=0, epochs=1, seed=None)  # 31 tokens in six packs of 6
    shares = []
    for _ in made:
        shares.append((made.last.real, made.last.total, made.last.share))
    assert made.dataset.num_tokens == 31
    assert shares == [(6, 6, 1.0), (6, 6, 1.0), (12, 12, 1.0), (7, 12, 7 / 12)]
    assert (made.consumed.real, made.consumed.total) == (31, 36)


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    next(loader(prefetch=0))
    assert torch.equal(torch.rand(2), expected)


def test_an_error_in_the_worker_is_raised_here() -> None:
    # In its own words alone: they are shown to who made the data.
    with pytest.raises(DataError, match=r"^sample 3: token 0 has id 301, outside the vocabulary of 301$"):
        list(loader(prefetch=2, vocab_size=301, seed=None))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_leaves_the_loader_where_it_was(prefetch: int) -> None:
    broken = loader(prefetch=prefetch, vocab_size=301, seed=None)
    states = [broken.state_dict()]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        states.extend(broken.state_dict() for _ in broken)
    assert len(states) > 1 and broken.state_dict() == states[-1]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        next(broken)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 6}, "the saved seed is 5, this dataset's is 6"),
        ({"seed": None}, "the saved seed is 5, this dataset's is None"),
        ({"seq_len": 4}, "the saved num_packs is 6, this dataset's is 4"),
        ({"use_packed_dataset": False}, "the saved num_tokens is 31, this dataset's is 25"),
        ({"drop_last": True}, "the saved num_tokens is 31, this dataset's is 30"),
    ],
)
def test_a_state_of_other_data_is_refused(other: dict[str, Any], message: str) -> None:
    state = loader(prefetch=0).state_dict()
    with pytest.raises(ValueError, match=message):
        loader(prefetch=0, **other).load_state_dict(state)


def test_other_lengths_that_add_up_to_the_same_are_refused() -> None:
    def of(samples: list[list[int]]) -> PackedLoader:
        dataset = PackedDataset(ListSource(samples), micro_bsz=1, seq_len=2)
        return PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=1), prefetch=0)

    with pytest.raises(ValueError, match=r"the saved lengths_crc32 is \d+, this dataset's is \d+"):
        of([[1, 2], [3]]).load_state_dict(of([[1], [2, 3]]).state_dict())


def test_other_refusals() -> None:
    made = loader(prefetch=0)
    with pytest.raises(ValueError, match=r"pack=7, step=1\) is outside an epoch of 6 packs"):
        made.load_state_dict(made.state_dict() | {"position": {"epoch": 0, "pack": 7, "step": 1}})
    with pytest.raises(ValueError, match="the sampler is for 5 packs, the dataset has 6"):
        PackedLoader(made.dataset, PackBatchSampler(5, micro_num=1))
    with pytest.raises(ValueError, match="prefetch must not be negative, got -1"):
        PackedLoader(made.dataset, made.sampler, prefetch=-1)
