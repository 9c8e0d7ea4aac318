"""Which tokens see each other: the documents of a batch, found from its whole rows.

A document is a run of tokens that attend to each other causally and to nothing else: a row, what is real of a padded
row, or one of several documents packed into a row. Attention works on the flat batch, so that all of these are the same
thing: pairs of a run of queries and a run of keys.

Legend: b rows, N tokens of a whole row, n ranks, s = N/n tokens of a row on a rank. Flat positions count b * N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from roll.errors import UserError


@dataclass(frozen=True)
class Run:
    """Queries and the keys up to the last of them: query i is at the key of index `keys - queries + i`."""

    query: int
    """Flat position of the first query."""
    key: int
    """Flat position of the first key."""
    queries: int
    keys: int


@dataclass
class Runs:
    """What one rank computes: runs over `tokens` flat queries, each query in at most one of them."""

    tokens: int
    runs: list[Run]
    device: torch.device

    @cached_property
    def by_shape(self) -> list[tuple[int, int, Tensor, Tensor]]:
        """Runs of equal shape together: (m queries, l keys, flat queries `[r * m]`, flat keys `[r * l]`) of r runs."""

        def shape(run: Run) -> tuple[int, int]:
            return run.queries, run.keys

        groups = []
        for (queries, keys), runs in groupby(sorted(self.runs, key=shape), shape):
            same = list(runs)
            starts = torch.tensor([(run.query, run.key) for run in same]).unsqueeze(-1)
            flat_queries = (starts[:, 0] + torch.arange(queries)).flatten().to(self.device)
            flat_keys = (starts[:, 1] + torch.arange(keys)).flatten().to(self.device)
            groups.append((queries, keys, flat_queries, flat_keys))
        return groups

    @cached_property
    def joined(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs one after another: int32 bounds of their queries and of their keys, flat queries, flat keys."""
        lengths = torch.tensor([(run.queries, run.keys) for run in self.runs], dtype=torch.int32).view(-1, 2)
        bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (0, 0, 1, 0)).to(self.device)
        queries = [torch.arange(run.query, run.query + run.queries) for run in self.runs]
        keys = [torch.arange(run.key, run.key + run.keys) for run in self.runs]
        flat_queries, flat_keys = (torch.cat(each or [torch.arange(0)]).to(self.device) for each in (queries, keys))
        return bounds[:, 0].contiguous(), bounds[:, 1].contiguous(), flat_queries, flat_keys


@dataclass
class Documents:
    """The documents of a batch of b rows, as flat spans; the same on all ranks."""

    rows: int
    length: int
    spans: list[tuple[int, int]]
    device: torch.device
    _parts: dict[tuple[int, int], Runs] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def whole(self) -> Runs:
        """All tokens: what a rank computes for its share of the heads."""
        runs = [Run(start, start, stop - start, stop - start) for start, stop in self.spans]
        return Runs(self.rows * self.length, runs, self.device)

    def part(self, rank: int, ranks: int) -> Runs:
        """Queries of one rank's part of every row, against the keys of all: what it computes for all heads.

        Every layer asks for the same one, so it is kept.
        """
        if (rank, ranks) not in self._parts:
            self._parts[rank, ranks] = self._part(rank, ranks)
        return self._parts[rank, ranks]

    def _part(self, rank: int, ranks: int) -> Runs:
        size = self.length // ranks
        runs = []
        for row in range(self.rows):
            begin = row * self.length + rank * size
            for start, stop in self.spans:
                first, last = max(start, begin), min(stop, begin + size)
                if first < last:
                    runs.append(Run(row * size + first - begin, start, last - first, last - start))
        return Runs(self.rows * size, runs, self.device)


def find_documents(
    rows: int,
    length: int,
    device: torch.device,
    *,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Documents:
    """The documents of `rows` rows of `length` tokens.

    They begin where `cu_seqlens` (`[documents + 1]` over the flat batch) says; without it, where `position_ids`
    (`[rows, length]`) do not continue, which is transformers' rule; without both, with every row. Tokens whose
    `attention_mask` (`[rows, length]`) is zero belong to no document.

    Raises:
        ValueError: `cu_seqlens` does not rise from 0 to the number of tokens, or a document has padding inside.
    """
    begins = torch.zeros(rows, length, dtype=torch.bool)
    if cu_seqlens is not None:
        ends = cu_seqlens.cpu().long()
        if ends.ndim != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != rows * length or (ends.diff() <= 0).any():
            raise UserError(
                f"cu_seq_lens must rise from 0 to the {rows} x {length} tokens of the whole, unsplit batch, "
                f"got {ends.tolist()}"
            )
        begins.view(-1)[ends[:-1]] = True
    else:
        begins[:, 0] = True
        if position_ids is not None:
            begins[:, 1:] = position_ids.cpu().diff(dim=1) != 1
    document = begins.view(-1).cumsum(0)
    real = torch.ones(rows * length, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask.cpu().bool().reshape(-1)
    changes = (document.diff() != 0) | (real[1:] != real[:-1])
    edges = [0, *(changes.nonzero().flatten() + 1).tolist(), rows * length]
    spans = [(start, stop) for start, stop in pairwise(edges) if real[start]]
    owners = document[[start for start, _ in spans]].tolist()
    twice = next((i for i in range(1, len(owners)) if owners[i] == owners[i - 1]), None)
    if twice is not None:
        row, token = divmod(spans[twice][0], length)
        raise UserError(
            f"attention_mask has padding inside row {row}, before token {token}; it may be at the ends only"
        )
    return Documents(rows, length, spans, device)
