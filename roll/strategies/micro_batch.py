"""Micro-batches as the model takes them: this rank's packed tokens, and what a loss is given of them.

A micro-batch of rows (reinforcement learning) is packed here; one of token ids and labels (supervised training, in
`roll.strategies.tokens`) comes packed. Legend: b rows, s tokens of a row that this rank holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from roll.data.packing import PackedRows, pack_rows
from roll.data.sequence_split import SequenceSplit
from roll.models.packed_sequence import PackedSequence
from roll.protocol import DataProto
from roll.strategies.output import ModelOutput
from roll.strategies.packed_output import OwnOutput, PackedOutput

Data = TypeVar("Data")
Output = TypeVar("Output")


@dataclass(frozen=True)
class MicroBatch(ABC, Generic[Data, Output]):
    """A micro-batch on one rank. A loss is a function of its `data` and its `output`."""

    data: Data
    """First argument of the loss."""
    input_ids: Tensor
    """`[b, s]` int64: this rank's tokens."""
    packed: PackedSequence
    """Where the segments begin, and where this rank's tokens stand in them."""

    @abstractmethod
    def output(self, own: OwnOutput) -> Output:
        """Second argument of the loss, from the model's answers about this rank's tokens."""


@dataclass(frozen=True)
class RowMicroBatch(MicroBatch[DataProto, ModelOutput]):
    """Padded rows `[b, S]`, packed to one row of tokens. The loss is a `LossFunc`."""

    rows: PackedRows

    @classmethod
    def of(cls, data: DataProto, split: SequenceSplit) -> RowMicroBatch:
        """Drop the padding, pack the rows as the ranks need them, and take this rank's tokens."""
        rows = pack_rows(
            data["input_ids"],
            data["attention_mask"],
            multiple_of=split.parallel.row_multiple,
            segment_multiple_of=split.parallel.segment_multiple,
        )
        packed = PackedSequence.of(rows, split)
        return cls(data, packed.own(rows.input_ids), packed, rows)

    def output(self, own: OwnOutput) -> PackedOutput:
        return PackedOutput(own, self.rows, self.packed.held)
