"""Which samples a rank draws: the same as its sequence-parallel peers, others than its data-parallel ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from roll.errors import UserError
from roll.parallel.sequence.agreement import agree
from roll.parallel.sequence.groups import get_data_parallel_rank, get_data_parallel_world_size
from roll.parallel.sequence.launch import SLURM_NAMES


class SequenceParallelSampler(Sampler[int]):
    """For `DataLoader(dataset, sampler=SequenceParallelSampler(dataset))`.

    Every epoch has an order of its own, drawn from (seed, epoch). Data-parallel rank r of n takes every n-th sample of
    it, beginning with the r-th. All ranks have the same number of samples: with `round_up` the epoch is continued
    from its head until it divides, otherwise its tail is left out.

    Example: 5 samples in order 3 1 4 0 2, two data-parallel ranks. With `round_up` they take 3 4 2 and 1 0 3, without
    it 3 4 and 1 0.

    Two passes without `set_epoch` in between have the same order. A sampler belongs to the groups that it was made in.

    Without `init_sequence_parallel` every rank of torch.distributed draws samples of its own, and a process that has
    no torch.distributed draws all of them.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None, round_up: bool = True) -> None:
        """Collective over all ranks. `seed=None` draws one, the same for all ranks.

        Raises:
            ValueError: the dataset is empty, or too small for `round_up=False`; the seed is no integer or negative; or
                ranks disagree.
            RuntimeError: a launcher has started several processes, but torch.distributed is not initialised; or the
                groups were destroyed.
        """
        if not dist.is_initialized():
            _check_that_alone()
        self.dp_rank, self.dp_size = self._made_for = _data_parallel()
        self.shuffle, self.round_up, self.length = shuffle, round_up, len(dataset)
        problem = None
        if self.length == 0:
            problem = "the dataset is empty"
        elif not round_up and self.length < self.dp_size:
            problem = (
                f"the dataset has {self.length} samples, fewer than the {self.dp_size} data-parallel ranks, and "
                "round_up is false: no rank would have any"
            )
        elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            problem = f"seed must be a non-negative integer, got {seed!r}"
        world = dist.group.WORLD if dist.is_initialized() else None
        agree(world, problem, length=self.length, shuffle=shuffle, seed=seed, round_up=round_up)
        self.seed = seed if seed is not None else _shared_seed()
        self.epoch = 0
        # Samples of the epoch, on all ranks together: where the next pass begins, where this one began, what is behind.
        self._begin = self._began = self._behind = 0

    def __len__(self) -> int:
        """Samples of a whole epoch for one rank. Raises RuntimeError as a pass does."""
        self._check_groups()
        return self._samples_of(self.length)

    def __iter__(self) -> Iterator[int]:
        """A pass over the epoch.

        Raises:
            RuntimeError: the data-parallel ranks are no longer those that the sampler was made for.
        """
        self._check_groups()
        return self._pass()

    def _pass(self) -> Iterator[int]:
        begin = self._began = self._behind = self._begin
        self._begin = 0
        order = self._order()
        rest = order[begin:]
        total = self._samples_of(len(rest)) * self.dp_size
        repeated = np.resize(order, max(0, total - len(rest)))  # from the head, as often as needed
        for sample in np.concatenate((rest, repeated))[self.dp_rank : total : self.dp_size]:
            self._behind += self.dp_size
            yield int(sample)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass. Of the epoch that was loaded, what is behind stays behind."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._begin = self._began = self._behind = 0

    def state_dict(self, samples: int | None = None) -> dict[str, Any]:
        """What `load_state_dict` continues from, the same on all ranks.

        Args:
            samples: of this pass that this rank has worked on. By default those it has drawn, which is more if a
                DataLoader fetches ahead.
        """
        behind = self._behind if samples is None else self._began + samples * self.dp_size
        return {
            "epoch": self.epoch,
            "behind": behind,
            "seed": self.seed,
            "length": self.length,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the middle of an epoch, with as many data-parallel ranks as there are now.

        Raises:
            ValueError: the state is of another dataset or order, or no sampler's.
        """
        missing = {"epoch", "behind", "seed", "length", "shuffle"} - set(state)
        if missing:
            raise UserError(f"the sampler's state has no {', '.join(sorted(missing))}")
        if state["behind"] < 0:
            raise UserError(f"the sampler's state has a negative number of samples behind, {state['behind']}")
        for name in ("length", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(f"the sampler's state has {name} {state[name]}, this sampler {getattr(self, name)}")
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._begin = self._began = self._behind = min(state["behind"], self.length)

    def _check_groups(self) -> None:
        now = _data_parallel()
        if now != self._made_for:
            (rank, size), (rank_now, size_now) = self._made_for, now
            raise RuntimeError(
                f"the sampler was made for data-parallel rank {rank} of {size}, but this is rank {rank_now} of "
                f"{size_now} now, so peers could draw different samples: make it after init_sequence_parallel"
            )

    def _samples_of(self, samples: int) -> int:
        """For one rank, of so many for all."""
        return (samples + self.dp_size - 1 if self.round_up else samples) // self.dp_size

    def _order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.length)


def _data_parallel() -> tuple[int, int]:
    """Rank and size, as they are now."""
    return get_data_parallel_rank(), get_data_parallel_world_size()


def _check_that_alone() -> None:
    """Raise RuntimeError if a launcher has started several processes, as its variables say.

    Those of torch come first: inside a Slurm job they may say that this process is one of its own.
    """
    name = next((name for name in ("WORLD_SIZE", SLURM_NAMES["WORLD_SIZE"]) if name in os.environ), None)
    if name is not None and int(os.environ[name]) > 1:
        raise RuntimeError(
            f"SequenceParallelSampler: {name} is {os.environ[name]}, but torch.distributed is not initialised, so "
            "every process would draw every sample: call init_dist first"
        )


def _shared_seed() -> int:
    """Drawn by rank 0 and told to the others."""
    drawn = [int(np.random.SeedSequence().generate_state(1)[0])]
    if dist.is_initialized():
        dist.broadcast_object_list(drawn, src=0)
    return drawn[0]
