"""Equal inside a group, disjoint over groups, as long on every rank, and continued in the middle."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from roll.parallel.sequence import SequenceParallelSampler, get_data_parallel_rank, sequence_parallel_groups
from tests.parallel.sequence.test_groups import refusal
from tests.rank_pool import RankPool


def on_ranks(length: int, dp_size: int, **settings: Any) -> list[SequenceParallelSampler]:
    """The samplers that `dp_size` data-parallel ranks would have."""
    samplers = []
    for dp_rank in range(dp_size):
        sampler = SequenceParallelSampler(range(length), **settings)
        sampler.dp_rank, sampler.dp_size = dp_rank, dp_size
        samplers.append(sampler)
    return samplers


def test_the_example_of_the_docstring() -> None:
    with patch("roll.parallel.sequence.sampler.np.random.default_rng") as rng:
        rng.return_value.permutation.return_value = [3, 1, 4, 0, 2]
        assert [list(sampler) for sampler in on_ranks(5, 2, seed=0)] == [[3, 4, 2], [1, 0, 3]]
        assert [list(sampler) for sampler in on_ranks(5, 2, seed=0, round_up=False)] == [[3, 4], [1, 0]]


sizes = {
    "length": st.integers(1, 40),
    "dp_size": st.integers(1, 8),
    "seed": st.integers(0, 5),
    "epoch": st.integers(0, 3),
}


@given(**sizes, shuffle=st.booleans(), round_up=st.booleans())
def test_every_sample_once_and_equal_lengths(
    length: int, dp_size: int, seed: int, epoch: int, shuffle: bool, round_up: bool
) -> None:
    if not round_up and length < dp_size:
        return
    samplers = on_ranks(length, dp_size, seed=seed, shuffle=shuffle, round_up=round_up)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in samplers]
    assert (
        {len(own) for own in drawn} == {len(samplers[0])} == {-(-length // dp_size) if round_up else length // dp_size}
    )
    together = [sample for step in zip(*drawn, strict=True) for sample in step]
    first = together[:length] if round_up else together
    assert len(set(first)) == len(first)
    if round_up:
        assert set(first) == set(range(length))
        assert together[length:] == (first * dp_size)[: len(together) - length]  # repeated from the head
    if not shuffle:
        assert first == list(range(len(first)))


@given(**sizes, other=st.integers(1, 8), steps=st.integers(0, 40))
def test_it_continues_with_other_ranks(
    length: int, dp_size: int, seed: int, epoch: int, other: int, steps: int
) -> None:
    """Drawn before and after a stop, also by another number of ranks: every sample, in the order of one rank."""
    before = on_ranks(length, dp_size, seed=seed)
    states, drawn = [], []
    for sampler in before:
        sampler.set_epoch(epoch)
        samples = iter(sampler)
        drawn.append([sample for _, sample in zip(range(steps), samples, strict=False)])
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    after = on_ranks(length, other, seed=seed + 1)
    for sampler in after:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(epoch)  # as a loop over epochs does: what is behind stays behind
    rest = [list(sampler) for sampler in after]
    assert len({len(own) for own in rest}) == 1
    in_order = [sample for step in zip(*drawn, strict=True) for sample in step]
    in_order += [sample for step in zip(*rest, strict=True) for sample in step]
    whole = on_ranks(length, 1, seed=seed)[0]
    whole.set_epoch(epoch)
    assert in_order[:length] == list(whole)
    # The next pass and the next epoch are whole again.
    assert len(list(after[0])) == len(after[0])
    after[0].set_epoch(epoch + 1)
    assert len(list(after[0])) == len(after[0])


def test_epochs_and_seeds_differ() -> None:
    """(seed 3, epoch 1) is not (seed 4, epoch 0), as it is where the two are added."""
    orders = set()
    for seed in range(4):
        sampler = SequenceParallelSampler(range(50), seed=seed)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler))
            assert tuple(sampler) in orders  # the same again
    assert len(orders) == 16


def test_samples_that_a_loader_fetched_ahead() -> None:
    """Of 12 samples on one rank 6 are drawn but 4 are learned: the state that is told so continues with the fifth."""
    (sampler,) = on_ranks(12, 1, shuffle=False)
    samples = iter(sampler)
    for _ in range(6):
        next(samples)
    assert sampler.state_dict()["behind"] == 6
    state = sampler.state_dict(samples=4)
    (resumed,) = on_ranks(12, 1, shuffle=False)
    resumed.load_state_dict(state)
    assert list(resumed) == list(range(4, 12))
    resumed.load_state_dict(state)
    iter_of_rest = iter(resumed)
    assert [next(iter_of_rest), next(iter_of_rest)] == [4, 5]
    assert resumed.state_dict(samples=1)["behind"] == 5  # the fifth of the epoch, the first of this pass


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        SequenceParallelSampler([])
    for seed in (-1, 1.5, "x", True):
        with pytest.raises(ValueError, match=f"seed must be a non-negative integer, got {seed!r}"):
            SequenceParallelSampler([1], seed=seed)  # type: ignore[arg-type]
    state = SequenceParallelSampler(range(3)).state_dict()
    with pytest.raises(ValueError, match="state has length 3, this sampler 4"):
        SequenceParallelSampler(range(4)).load_state_dict(state)
    with pytest.raises(ValueError, match="state has no behind, epoch"):
        SequenceParallelSampler(range(3)).load_state_dict({"seed": 0, "length": 3, "shuffle": True})
    with pytest.raises(ValueError, match="negative number of samples behind, -3"):
        SequenceParallelSampler(range(3)).load_state_dict(state | {"behind": -3})
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        with (
            patch.dict(os.environ, {name: "2"}),
            pytest.raises(RuntimeError, match=rf"{name} is 2, but torch\.distributed is not initialised"),
        ):
            SequenceParallelSampler([1])


def draw() -> dict[str, Any]:
    """On four ranks in pairs: a loader's epochs, a seed that nobody gave, and what ranks may not disagree on."""
    early = SequenceParallelSampler(range(8), shuffle=False)
    unsplit = list(early)
    with sequence_parallel_groups(2):
        sampler = SequenceParallelSampler(range(10))
        loader: DataLoader[Any] = DataLoader(range(10), sampler=sampler, batch_size=2)  # type: ignore[arg-type]
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append([batch.tolist() for batch in loader])
        own = dist.get_rank()
        found = {
            "unsplit": unsplit,
            "group": get_data_parallel_rank(),
            "epochs": epochs,
            "lengths": refusal(lambda: SequenceParallelSampler(range(10 + own // 3))),
            "seeds": refusal(lambda: SequenceParallelSampler(range(10), seed=own)),
            "no seed": refusal(lambda: SequenceParallelSampler(range(10), seed="x" if own == 3 else 1)),  # type: ignore[arg-type]
            "small": refusal(lambda: SequenceParallelSampler([1], round_up=False)),
            "early": refusal(lambda: iter(early)),
            "early length": refusal(lambda: len(early)),
        }
    return found | {"late": refusal(lambda: iter(sampler))}


def test_ranks(ranks: RankPool) -> None:
    found = ranks.run(draw, world_size=4)
    assert [rank["unsplit"] for rank in found] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [rank["group"] for rank in found] == [0, 0, 1, 1]
    assert found[0]["epochs"] == found[1]["epochs"]
    assert found[2]["epochs"] == found[3]["epochs"]
    for epoch in range(2):
        drawn = [sample for rank in (0, 2) for batch in found[rank]["epochs"][epoch] for sample in batch]
        assert sorted(drawn) == list(range(10))
    assert found[0]["epochs"][0] != found[0]["epochs"][1]
    for rank in found:
        assert rank["lengths"].endswith("length differs between the ranks of the group: 10, 10, 10, 11")
        assert rank["seeds"].endswith("seed differs between the ranks of the group: 0, 1, 2, 3")
        assert rank["no seed"].endswith("rank 3 of the group: seed must be a non-negative integer, got 'x'")
        assert rank["early"] == rank["early length"]
        assert "make it after init_sequence_parallel" in rank["early"]
        assert "the sequence-parallel groups were destroyed" in rank["late"]
        assert "1 samples, fewer than the 2 data-parallel ranks" in rank["small"]
