"""One row of packed data, `[P]`, and how it is put together from pieces of samples.

P = micro_bsz * seq_len. Here samples come as sequences of different lengths and one row of equal length is made of
several; `roll.data.packing` packs the padded rows of a batch instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from roll.data.sources.sample import Sample, SampleSource
from roll.errors import UserError

PAD_ID = 0
IGNORED = -100
"""The label of a token whose next token is not learned."""


@dataclass(frozen=True)
class Pack:
    """P tokens of one or more segments, with their labels.

    Example, P = 8: samples `[5 6 7]` and `[8 9]` give input_ids `[5 6 7 8 9 0 0 0]`, labels
    `[6 7 -100 9 -100 -100 -100 -100]`, cu_seqlens `[0 3 5 8]` and indexes `[0 1 2 0 1 0 1 2]`. The padding is a segment
    of its own.
    """

    input_ids: Tensor
    """`[P]` int64."""
    labels: Tensor
    """`[P]` int64: the next token, or -100."""
    cu_seqlens: Tensor
    """`[segments + 1]` int32: the first token of each segment, then P. No segment is empty."""
    indexes: Tensor
    """`[P]` int64: the position of each token in its segment."""
    num_tokens: int
    """Real tokens; the others are padding at the end."""


class Piece(NamedTuple):
    """Tokens `start` to `stop` of a sample."""

    sample: int
    start: int
    stop: int
    known: int
    """Tokens of the sample that may be labels: those before `known`. The token at `stop` is one if it is before."""


class Plan(Protocol):
    """Pieces of samples that each pack holds; worked out per pack, never kept."""

    num_tokens: int
    """Real tokens of all packs: those of the samples, less what the plan leaves out."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> list[Piece]: ...


def assemble(pieces: Iterable[tuple[Piece, Sample]], *, micro_bsz: int, seq_len: int) -> Pack:
    """The pack of these pieces, in their order, padded to P with id 0 and label -100.

    A piece is a segment; one longer than `seq_len` is several, each of `seq_len` tokens but the last. Labels do not end
    there: the last token of such a segment still has the true next token as its label. The padding is one segment,
    however long it is.
    """
    length = micro_bsz * seq_len
    ids = np.full(length, PAD_ID, dtype=np.int64)
    labels = np.full(length, IGNORED, dtype=np.int64)
    starts: list[int] = []
    end = 0
    for piece, sample in pieces:
        begin, end = end, end + piece.stop - piece.start
        starts.extend(range(begin, end, seq_len))
        ids[begin:end] = sample.ids[piece.start : piece.stop]
        following = slice(piece.start + 1, min(piece.stop + 1, piece.known))
        next_ids = np.where(sample.in_loss[following], sample.ids[following], IGNORED)
        labels[begin : begin + len(next_ids)] = next_ids
    if end < length:
        starts.append(end)
    cu_seqlens = np.array([*starts, length], dtype=np.int32)
    indexes = np.arange(length) - np.repeat(cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens))
    of = torch.from_numpy
    return Pack(of(ids), of(labels), of(cu_seqlens), of(indexes), num_tokens=end)


def check_sizes(micro_bsz: int, seq_len: int) -> None:
    """Raise ValueError for a size below 1."""
    for name, value in {"micro_bsz": micro_bsz, "seq_len": seq_len}.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")


def build_all(plan: Plan, source: SampleSource, *, micro_bsz: int, seq_len: int) -> list[Pack]:
    """Every pack of a plan, in order."""
    plans = (plan[index] for index in range(len(plan)))
    return [
        assemble(((piece, source[piece.sample]) for piece in pieces), micro_bsz=micro_bsz, seq_len=seq_len)
        for pieces in plans
    ]
