"""Batches that are still remote: cut, joined and handed on without fetching a row.

A reference is whatever gives a `concurrent.futures.Future`: the Future itself, or an object whose method `future()`
makes one, as a Ray `ObjectRef` has. So this module needs no Ray, and a reference travels as Ray lets it travel.

    driver      results = [worker.compute.remote(share) for worker, share in ...]        DataProto on the workers
                shares = DataProtoFuture.concat(results, sizes=[8, 8]).chunk(4)          no row has moved
    receiver    batch = share.get(timeout=60)                                            fetches what its rows need
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from roll.errors import UserError
from roll.protocol import joining, row_order
from roll.protocol.batch_data import BatchData
from roll.protocol.field_names import listed
from roll.protocol.metrics import without_metrics
from roll.protocol.remote_rows import RemoteRows

if TYPE_CHECKING:
    from roll.protocol.data_proto import DataProto


@dataclass(frozen=True)
class _Part:
    """Rows begin:end of what `source` (a reference or another DataProtoFuture) gives; None where it is not known."""

    source: Any
    size: int | None = None
    begin: int = 0
    end: int | None = None
    metrics: bool = True
    """Whether the metrics of the source come along."""
    head: DataProto | None = None
    """The fields and the meta_info of the source, without a row; None where they are not known."""


@dataclass(frozen=True)
class DataProtoFuture(RemoteRows):
    """The rows of `parts` in order, or one chunk of them. Made by `concat`.

    Where the number of rows of each part is known, a chunk fetches only the parts that its rows are in; otherwise it
    fetches all of them, joins and cuts. Chunks have the rows that chunks of the fetched batch would have. Metrics
    (`roll.protocol.joining`) go with the first row of their part, or, where sizes are not known, with the first chunk.
    """

    parts: tuple[_Part, ...]
    share: tuple[int, int] | None = None
    """(i, n): chunk i of n of all rows."""
    fields: tuple[str, ...] | None = None
    """The fields that are left of what arrives; None for all."""

    @staticmethod
    def concat(
        data: Sequence[Any], sizes: Sequence[int] | None = None, heads: Sequence[DataProto] | None = None
    ) -> DataProtoFuture:
        """The rows of all references, in order.

        Args:
            data: references to one DataProto each; a DataProtoFuture is taken as well.
            sizes: the number of rows of each, if the caller knows them.
            heads: each without its rows, `batch[:0]`, if the caller knows them: what `select` and `stub` go by.

        Raises ValueError when there is none, one is no reference, the sizes are not one for each, at least 0, or the
        heads are not one for each.
        """
        if not data:
            raise UserError("concat needs at least one reference")
        if sizes is not None and (len(sizes) != len(data) or any(size < 0 for size in sizes)):
            raise UserError(f"{len(data)} references with sizes {list(sizes)}")
        if heads is not None and len(heads) != len(data):
            raise UserError(f"{len(data)} references with {len(heads)} heads")
        for number, reference in enumerate(data):
            if not _is_reference(reference):
                raise UserError(
                    f"reference {number} is a {type(reference).__name__}, neither a Future nor an object that makes one"
                )
        known: Sequence[int | None]
        if sizes is not None:
            known = sizes
        else:
            known = [r.num_rows if isinstance(r, DataProtoFuture) else None for r in data]
        fronts = [None] * len(data) if heads is None else heads
        parts = zip(data, known, fronts, strict=True)
        return DataProtoFuture(tuple(_Part(r, size, 0, size, head=head) for r, size, head in parts))

    @property
    def num_rows(self) -> int | None:
        """The number of rows, if it is known without fetching."""
        lengths = [part.end - part.begin for part in self.parts if part.end is not None]
        return sum(lengths) if len(lengths) == len(self.parts) and self.share is None else None

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Consecutive pieces, of the sizes that `DataProto.chunk` makes. Raises ValueError for less than one chunk."""
        bounds = row_order.chunk_bounds(self.num_rows or 0, chunks)
        if self.num_rows is None:
            whole = self if self.share is None else DataProtoFuture((_Part(self),), fields=self.fields)
            return [replace(whole, share=(number, chunks)) for number in range(chunks)]
        pieces = [self._rows(begin, end) for begin, end in bounds]
        # A part without rows is in no piece; its metrics go with the first.
        rowless = tuple(part for part in self.parts if part.begin == part.end)
        return [replace(pieces[0], parts=rowless + pieces[0].parts), *pieces[1:]]

    def _rows(self, begin: int, end: int) -> DataProtoFuture:
        """These rows, from the parts that hold them; no rows are an empty piece of the first part."""
        chosen, seen = [], 0
        for part in self.parts:
            assert part.end is not None
            first, last = max(begin - seen, 0), min(end - seen, part.end - part.begin)
            if first < last:
                metrics = part.metrics and first == 0
                chosen.append(replace(part, begin=part.begin + first, end=part.begin + last, metrics=metrics))
            seen += part.end - part.begin
        return replace(self, parts=tuple(chosen) or (replace(self.parts[0], begin=0, end=0, metrics=False),))

    def select(self, fields: str | Iterable[str]) -> DataProtoFuture:
        """The same rows with these fields, tensors or objects. A reference is to a whole batch, so all is fetched.

        Raises ValueError if a part lacks one: now where heads are known, else when it is fetched.
        """
        names = listed(fields)
        for head in self._heads() or []:
            head.select_fields(names)
        return replace(self, fields=tuple(names))

    def stub(self) -> DataProto:
        """The stub of what arrives: its meta_info.

        Raises ValueError if that is not known without fetching, or differs between the parts in more than metrics.
        """
        heads = self._heads()
        if heads is None:
            raise UserError(
                "the meta_info of a DataProtoFuture is known without its rows only if it is made with heads"
            )
        return replace(heads[0].stub(), meta_info=joining.concat_metas([head.meta_info for head in heads]))

    def _heads(self) -> list[DataProto] | None:
        """The heads of all sources as they will arrive; None if one is not known."""
        found: list[DataProto] = []
        for part in self.parts:
            nested = isinstance(part.source, DataProtoFuture)
            heads = part.source._heads() if nested else None if part.head is None else [part.head]
            if heads is None:
                return None
            found += heads if part.metrics else map(_without_metrics, heads)
        if self.share is not None and self.share[0]:
            found = list(map(_without_metrics, found))
        return found if self.fields is None else [head.select_fields(self.fields) for head in found]

    def get(self, timeout: float | None = None, *, global_keys: str | Iterable[str] | None = None) -> DataProto:
        """Wait for the parts, and join and cut them here.

        Args:
            timeout: seconds for all parts together; None waits for ever.
            global_keys: as `DataProto.concat` takes them.

        Raises:
            TimeoutError: names the parts that have not arrived.
            ValueError: a part is no DataProto or has not the promised number of rows, or the parts cannot be joined.
            Exception: whatever the first part that failed raises, as soon as it fails, without waiting for the others.
        """
        arrived, names = _fetched(list(dict.fromkeys(self.references())), timeout), listed(global_keys)
        whole = self._joined(arrived, names)
        # A part that was joined of others has lists already; here each of those others counts.
        entries = joining.gathered_entries([arrived[source].meta_info for source in self.references()], names)
        return replace(whole, meta_info={**whole.meta_info, **entries}) if entries else whole

    def references(self) -> Iterator[Hashable]:
        """What will be fetched."""
        for part in self.parts:
            if isinstance(part.source, DataProtoFuture):
                yield from part.source.references()
            else:
                yield part.source

    def _joined(self, arrived: Mapping[Any, Any], global_keys: list[str]) -> DataProto:
        pieces: list[DataProto] = []
        for number, part in enumerate(self.parts):
            nested = isinstance(part.source, DataProtoFuture)
            found = part.source._joined(arrived, global_keys) if nested else arrived[part.source]
            if not isinstance(found, BatchData):
                raise UserError(f"part {number} is a {type(found).__name__}, not a DataProto")
            piece = cast("DataProto", found)
            if part.size is not None and len(piece) != part.size:
                raise UserError(f"part {number} has {len(piece)} rows, not {part.size} as was said")
            if self.fields is not None:
                piece = piece.select_fields(self.fields)
            rows = piece if part.end is None else piece[part.begin : part.end]
            pieces.append(rows if part.metrics else _without_metrics(rows))
        whole = pieces[0].concat(pieces, global_keys=global_keys)
        return whole if self.share is None else whole.chunk(self.share[1])[self.share[0]]


def _without_metrics(piece: DataProto) -> DataProto:
    return replace(piece, meta_info=without_metrics(piece.meta_info))


def _is_reference(value: Any) -> bool:
    return isinstance(value, Future | DataProtoFuture) or callable(getattr(value, "future", None))


def _fetched(references: Sequence[Any], timeout: float | None) -> dict[Any, Any]:
    """What the references give, waiting for all of them at once."""
    begun = time.monotonic()
    futures = [r if isinstance(r, Future) else r.future() for r in references]
    done, missing = wait(futures, timeout, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()  # raises what the part raised
    if missing:
        late = [number for number, future in enumerate(futures) if future in missing]
        seconds = time.monotonic() - begun
        raise TimeoutError(f"{len(late)} of {len(futures)} parts did not arrive in {seconds:.1f} s: number {late}")
    return {reference: future.result() for reference, future in zip(references, futures, strict=True)}
