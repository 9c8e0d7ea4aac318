"""InternEvo's calls as methods of one object: each call takes the data and the label, the rest is bound beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.config import Mode
from roll.data import loading, processing
from roll.data.loading import Data
from roll.errors import UserError


class BatchLoader:
    """A step's batch and its micro-batches in turn, for one rank.

        engine = BatchLoader(micro_bsz=2, seq_len=8, mode="isp", group=sequence_parallel_group)
        batch_data, actual_batch_size = engine.load_batch(data_iter)
        data, label = batch_data
        for _ in range(actual_batch_size):
            _data, _label = engine._load_accum_batch(data, label)

    The underscores are InternEvo's: there, schedulers call these methods of themselves. Shapes and fields are those of
    `roll.data.loading` and `roll.data.processing`, which do the work. M are the packs of a batch, P = micro_bsz *
    seq_len tokens each.
    """

    offset: int
    """Number of the micro-batch that comes next. `load_batch` begins at 0."""

    def __init__(
        self,
        *,
        micro_bsz: int,
        seq_len: int,
        mode: Mode = "mtp",
        group: ProcessGroup | None = None,
        sp_rank: int = 0,
        sp_size: int = 1,
        use_packed_dataset: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        """Bind the settings of one rank.

        Args:
            group: the ranks over which mode isp splits the sequence, in place of `sp_rank` and `sp_size`.
            device: device of the batches, apart from `cu_seqlens`; None: the CPU.

        Raises:
            ValueError: there is no such mode, a size is below 1, the sequence does not divide over the ranks, or
                `sp_rank` is none of them.
        """
        if group is not None:
            if (sp_rank, sp_size) != (0, 1):
                raise UserError(f"group has its own sp_rank and sp_size, but sp_rank={sp_rank}, sp_size={sp_size} came")
            sp_rank, sp_size = group.rank(), group.size()
        self._process = processing.data_process(
            use_packed_dataset=use_packed_dataset,
            micro_bsz=micro_bsz,
            seq_len=seq_len,
            mode=mode,
            sp_rank=sp_rank,
            sp_size=sp_size,
        )
        self._micro_bsz, self._seq_len, self._mode = micro_bsz, seq_len, mode
        self._sp_rank, self._sp_size = sp_rank, sp_size
        self._device = device
        self.offset = 0

    def load_batch(self, data_iter: Iterator[tuple[Data, Tensor]]) -> tuple[list[Any], int]:
        """The next batch `[data, label]`, and M. Its micro-batches begin at 0. Raises StopIteration after the last."""
        batch = loading.load_batch(data_iter, self._device)
        self.offset = 0
        return batch

    def _load_accum_batch(self, data: Data, label: Tensor) -> tuple[Data, Tensor]:
        """The next micro-batch, ready for the model. Raises IndexError after the last."""
        return self.data_process_func(*self._load_micro_batch(data, label))

    def _load_micro_batch(self, data: Data, label: Tensor) -> tuple[Data, Tensor]:
        """The next micro-batch as it is, its first dimension 1. Raises IndexError after the last."""
        if self.offset >= len(label):
            raise IndexError(f"all {len(label)} micro-batches of the batch are taken; load_batch begins the next batch")
        micro_batch = loading.load_micro_batch(data, label, self.offset)
        self.offset += 1
        return micro_batch

    def data_process_func(self, data: Data, label: Tensor) -> tuple[Data, Tensor]:
        """A micro-batch flattened or unpacked, and split in mode isp."""
        return loading.processed(data, label, self._process)

    def packed_data_normalizer(self, data: Data, label: Tensor) -> tuple[Data, Tensor]:
        """A packed micro-batch without the first dimension of `indexes` and `cu_seqlens`, and with `max_seqlen`."""
        return processing.packed_data_normalizer(data, label)

    def unpack_data(self, data: Data, label: Tensor) -> tuple[Data, Tensor]:
        """A micro-batch of whole samples as rows `[micro_bsz, seq_len]`, without `cu_seqlens` and `indexes`."""
        return processing.unpack_data(data, label, micro_bsz=self._micro_bsz, seq_len=self._seq_len)

    def split_data_sequence_parallel(self, data: Data, label: Tensor) -> tuple[Data, Tensor]:
        """This rank's part of the sequence. Raises ValueError in other modes than isp, which do not split here."""
        if self._mode != "isp":
            raise UserError(f"mode {self._mode} takes the whole sequence to the embedding; only isp splits the data")
        return processing.split_data_sequence_parallel(data, label, sp_rank=self._sp_rank, sp_size=self._sp_size)
