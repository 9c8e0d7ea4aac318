"""Batches of packs, made ahead of the step by a worker process.

The worker reads and packs the next batches while the step runs, `prefetch` of them at most, and waits when they are not
taken. What it has made ahead is not counted: the loader's position is behind the batch that was handed out last. An
error in the worker is raised by `next`, with its type and the worker's traceback; a DataError with its words alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from roll.data.batch_sampler import PackAddress, PackBatchSampler, Position
from roll.data.loading import Data
from roll.data.packed_dataset import PackedDataset
from roll.data.packs import Pack
from roll.data.sources.sample import DataError
from roll.errors import UserError


@dataclass(frozen=True)
class TokenCount:
    """Number of real tokens and of all tokens in packs."""

    real: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """Real tokens per token, 1.0 where there is no padding."""
        return self.real / self.total

    def __add__(self, other: TokenCount) -> TokenCount:
        return TokenCount(self.real + other.real, self.total + other.total)


class PackedLoader:
    """An iterator of `(data, labels)`, one pair per step of this rank, as `load_batch` takes them.

    It goes through the epochs of its sampler, and continues from a saved state as if it had never stopped.
    """

    def __init__(
        self, dataset: PackedDataset, sampler: PackBatchSampler, *, prefetch: int = 2, pin_memory: bool = False
    ) -> None:
        """Read `dataset` in the steps of `sampler`.

        Args:
            dataset: at any epoch; the loader asks for others itself.
            sampler: made for `len(dataset)` packs.
            prefetch: batches kept ready by the worker; 0 builds each in this process when it is asked for.
            pin_memory: whether tensors are in memory from which a device copies without waiting.

        Raises ValueError if dataset and sampler disagree, or `prefetch` is negative.
        """
        if sampler.num_packs != len(dataset):
            raise UserError(f"the sampler is for {sampler.num_packs} packs, the dataset has {len(dataset)}")
        if prefetch < 0:
            raise UserError(f"prefetch must not be negative, got {prefetch}")
        self.dataset = dataset
        self.sampler = sampler
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.position = Position(epoch=dataset.epoch)
        self.last = TokenCount()
        """Tokens of the last batch handed out, on this rank."""
        self.consumed = TokenCount()
        """Tokens of all batches that this object handed out, on this rank."""
        self._batches: Iterator[_Batch | DataError] | None = None
        self._positions: Iterator[Position] = iter(())

    def __iter__(self) -> Iterator[tuple[Data, Tensor]]:
        return self

    def __next__(self) -> tuple[Data, Tensor]:
        """The next batch; the worker starts at the first."""
        if self._batches is None:
            self._batches = iter(self._from(self.position))
            self._positions = (position for _, position in self.sampler.steps(self.position))
        batch: _Batch | None = None
        try:
            made = next(self._batches)
            if isinstance(made, DataError):
                raise made
            batch = made
        finally:
            if batch is None:
                self.close()  # A later call starts again at this place, which has not been handed out.
        self.position = next(self._positions)
        self.last = TokenCount(batch.num_tokens, batch.labels.numel())
        self.consumed += self.last
        cu_seqlens = list(batch.cu_seqlens.split(batch.cu_sizes))
        return {"input_ids": batch.input_ids, "cu_seqlens": cu_seqlens, "indexes": batch.indexes}, batch.labels

    def remaining_steps(self) -> int | None:
        """Steps until the end of the last epoch; None without an end."""
        return self.sampler.remaining_steps(self.position)

    def state_dict(self) -> dict[str, Any]:
        """The place behind the last batch handed out, and what it is a place in (all JSON); the same on all ranks."""
        return {"position": self.position.state_dict(), "dataset": self.dataset.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved place; what was made ahead is dropped.

        Another `dp_size`, `micro_num` or ramp-up is fine: the remaining packs of the epoch are dealt anew. Raises
        ValueError if the state belongs to other data, another length of packs or another shuffle.
        """
        identity = self.dataset.identity()
        for name, value in identity.items():
            if state["dataset"].get(name) != value:
                raise UserError(f"the saved {name} is {state['dataset'].get(name)}, this dataset's is {value}")
        position = Position(**state["position"])
        if min(asdict(position).values()) < 0 or position.pack > len(self.dataset):
            raise UserError(f"the saved {position} is outside an epoch of {len(self.dataset)} packs")
        self.position = position
        self.close()

    def close(self) -> None:
        """End the worker process; the next batch starts a new one."""
        self._batches = None

    def _from(self, position: Position) -> DataLoader[Any]:
        steps = _Steps(self.sampler, position)
        return DataLoader(
            _Reader(self.dataset),
            batch_sampler=steps,
            collate_fn=_collate,
            num_workers=1 if self.prefetch else 0,
            prefetch_factor=self.prefetch or None,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # of its own, so that starting to load leaves the caller's random state alone
        )


class _Batch(NamedTuple):
    """A batch as it travels from the worker: few tensors, because each takes a file handle of both processes."""

    input_ids: Tensor
    labels: Tensor
    indexes: Tensor
    cu_seqlens: Tensor
    """All packs' `cu_seqlens`, one after the other."""
    cu_sizes: list[int]
    num_tokens: int


class _Steps:
    """The addresses of each step, as DataLoader wants them: an iterable that starts from the same place each time."""

    def __init__(self, sampler: PackBatchSampler, position: Position) -> None:
        self._sampler = sampler
        self._position = position

    def __iter__(self) -> Iterator[list[PackAddress]]:
        return (packs for packs, _ in self._sampler.steps(self._position))


class _Reader(Dataset[Pack | DataError]):
    """Packs by epoch and number. Keeps the plan of one epoch: steps go through epochs in order.

    A DataError is returned: raised, it would come back with the worker's traceback for its message.
    """

    def __init__(self, dataset: PackedDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, address: PackAddress) -> Pack | DataError:
        if address.pack is None:
            return self._dataset.padding()
        self._dataset = self._dataset.at_epoch(address.epoch)
        try:
            return self._dataset[address.pack]
        except DataError as error:
            return error


def _collate(made: list[Pack | DataError]) -> _Batch | DataError:
    packs: list[Pack] = []
    for pack in made:
        if isinstance(pack, DataError):
            return pack
        packs.append(pack)
    return _Batch(
        input_ids=torch.stack([pack.input_ids for pack in packs]),
        labels=torch.stack([pack.labels for pack in packs]),
        indexes=torch.stack([pack.indexes for pack in packs]),
        cu_seqlens=torch.cat([pack.cu_seqlens for pack in packs]),
        cu_sizes=[len(pack.cu_seqlens) for pack in packs],
        num_tokens=sum(pack.num_tokens for pack in packs),
    )
