"""DataProto: a batch of rows, as it travels between driver, workers and strategies."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from roll.protocol import joining, row_order, storage
from roll.protocol.batch_data import BatchData, check_tensor, tensor_dict
from roll.protocol.field_names import check_kinds, known, listed, new_names
from roll.protocol.rows import RowIndex, cut_rows, object_array, repeat_rows, resolve_rows, take_rows, tile_rows


@dataclass(frozen=True, eq=False, repr=False, init=False)
class DataProto(BatchData):
    """Rows with tensors, Python objects and what holds for all rows.

    Example, three rows of four tokens:

        data = DataProto.from_dict({"input_ids": ids}, {"answer": ["4", "7", "1"]}, {"step": 3})
        len(data)                    # 3
        data["input_ids"]            # tensor [3, 4]
        data[1:]                     # DataProto, the last two rows
        data[-1]                     # DataProto, the last row alone
        DataProto.concat(data.chunk(2))  # the same rows again

    Every method returns something new and leaves this object and its arguments as they are; also `pop`, `union`,
    `rename`, `reorder` and `to`, which in ROLL and verl change the batch in place. Tensors are not copied: a batch has
    those that it was made of, and those of a result may be views of them (slices, chunks) or the same (`select`,
    `union`), so treat them as read-only; `clone` copies all. Arrays of objects are copied when a batch is made, the
    objects are not. `meta_info` is copied, never shared; its entry `metrics` is joined as `roll.protocol.joining` says.
    `plan` and `normalizers` speak of the rows as they are: operations that change the rows or their order (indexing,
    chunk, split, concat, repeat, reorder, padding, grouping, iteration) leave them out. A batch without rows is legal
    for every method.
    """

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor],
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """A batch of these tensors [B, ...] and lists or arrays of length B."""
        objects = {name: object_array(values, name) for name, values in (non_tensors or {}).items()}
        for name, value in tensors.items():
            check_tensor(name, value)
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        lengths |= {name: len(values) for name, values in objects.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"fields must have the same number of rows, got {lengths}")
        return cls(tensor_dict(tensors, next(iter(lengths.values()), 0)), objects, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, fields: Mapping[str, Tensor | Sequence[Any] | np.ndarray], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """A batch of these fields: tensors go to `batch`, lists and arrays to `non_tensor_batch`. See `to_dict`."""
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        objects = {name: value for name, value in fields.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, objects, meta_info)

    def __iter__(self) -> Iterator[DataProto]:
        return (self[row] for row in range(len(self)))

    # --- rows ---------------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str) -> Any: ...
    @overload
    def __getitem__(self, index: RowIndex) -> DataProto: ...
    def __getitem__(self, index: str | RowIndex) -> Any:
        """A field by name (tensor or object array), or rows by number, slice, list, array or mask as a DataProto.

        Raises KeyError for an unknown name, IndexError for a row that does not exist, ValueError or TypeError for what
        names no rows; `data[0, 1]` is among it, since arrays have another meaning for it.
        """
        if isinstance(index, tuple):
            raise TypeError(f"rows are given as a list: [{list(index)}], not [{', '.join(map(repr, index))}]")
        if isinstance(index, str):
            fields = self.to_dict()
            return fields[known([index], fields)[0]]
        return self._take(resolve_rows(index, len(self)))

    def _take(self, rows: slice | Tensor) -> DataProto:
        """Rows that exist. Without plan and normalizers, which spoke of the rows before."""
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        return self._with_rows(count, lambda values: take_rows(values, rows))

    def _with_rows(self, count: int, change: Callable[[Any], Any]) -> DataProto:
        """Every field changed to `count` rows in the same way."""
        self._check_lengths()
        tensors = {name: change(value) for name, value in self.tensors.items()}
        return self._of_checked(
            None if self.batch is None else tensor_dict(tensors, count),
            {name: change(values) for name, values in self.non_tensor_batch.items()},
            joining.own_meta(self.meta_info),
        )

    def _cut(self, bounds: Sequence[tuple[int, int]]) -> list[DataProto]:
        """Consecutive pieces of all rows; the first keeps the metrics, so that they are joined only once."""
        self._check_lengths()
        tensors = {name: cut_rows(value, bounds) for name, value in self.tensors.items()}
        objects = {name: cut_rows(values, bounds) for name, values in self.non_tensor_batch.items()}
        later = joining.without_metrics(self.meta_info)
        pieces = []
        for number, (begin, end) in enumerate(bounds):
            piece = {name: parts[number] for name, parts in tensors.items()}
            pieces.append(
                self._of_checked(
                    None if self.batch is None else tensor_dict(piece, end - begin),
                    {name: parts[number] for name, parts in objects.items()},
                    joining.own_meta(later if number else self.meta_info),
                )
            )
        return pieces

    def select_idxs(self, rows: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """These rows in this order, by number or by mask; what `data[rows]` gives, and raises."""
        return self._take(resolve_rows(rows, len(self)))

    def reorder(self, order: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """All rows in another order: row `order[i]` comes to place i.

        Raises ValueError unless each row stands in `order` once.
        """
        rows = resolve_rows(order, len(self))
        if isinstance(rows, slice):
            raise ValueError(f"reorder needs a list or an array of row numbers, got {order!r}")
        row_order.check_permutation(rows, len(self))
        return self._take(rows)

    def chunk(self, chunks: int) -> list[DataProto]:
        """Consecutive pieces whose sizes differ by one at most, the larger first; empty ones when rows are too few.

        Raises ValueError for less than one chunk.
        """
        return self._cut(row_order.chunk_bounds(len(self), chunks))

    def split(self, size: int) -> list[DataProto]:
        """Consecutive pieces of `size` rows, the last perhaps smaller; an empty batch is one empty piece.

        Raises ValueError for pieces of less than one row.
        """
        return self._cut(row_order.split_bounds(len(self), size))

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Every row `times` times: 0 0 1 1 with `interleave`, else 0 1 0 1. Raises ValueError if `times` is below 0."""
        row_order.check_count(times, 0, "repeat needs a number of times")
        change = repeat_rows if interleave else tile_rows
        return self._with_rows(len(self) * times, lambda values: change(values, times))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """(the rows, and as many of them again from the first on as lack to a multiple of `divisor`; how many).

        `padded.unpad(count)` undoes it. Raises ValueError if `divisor` is below 1.
        """
        count = row_order.num_padding_rows(len(self), divisor)
        return self._take(torch.arange(len(self) + count) % max(len(self), 1)), count

    def unpad(self, count: int) -> DataProto:
        """Without the last `count` rows. Raises ValueError if there are not so many."""
        row_order.check_count(count, 0, "unpad needs a number of rows")
        if count > len(self):
            raise ValueError(f"unpad of {count} rows from a batch of {len(self)} rows")
        return self._take(slice(0, len(self) - count))

    def group_by(self, names: str | Sequence[str]) -> dict[Hashable, DataProto]:
        """The rows of each value of a field, or of each tuple of values of several, in order of first appearance.

        Values are Python values: of an object field as they are, of a tensor [B] as numbers.

        Raises KeyError for an unknown name; ValueError for no name, a tensor that is not [B], a value that cannot be
        hashed, or NaN.
        """
        fields = self.to_dict()
        groups = row_order.rows_by_value({name: fields[name] for name in known(listed(names), fields)})
        return dict(zip(groups, self._pieces(resolve_rows(rows, len(self)) for rows in groups.values()), strict=True))

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Mini-batches of all rows, `epochs` times: in order, or in an order drawn anew each epoch from `seed`.

        The same seed gives the same orders, so vary it from step to step.

        Raises ValueError, at once, when the rows are not a multiple of `mini_batch_size`.
        """
        return self._pieces(row_order.mini_batch_rows(len(self), mini_batch_size, epochs, seed))

    def _pieces(self, taken: Iterable[slice | Tensor]) -> Iterator[DataProto]:
        """Rows after rows, as they are asked for; the first keeps the metrics, as in `_cut`."""
        for number, rows in enumerate(taken):
            piece = self._take(rows)
            if number:
                piece.meta_info.pop(joining.METRICS, None)
            yield piece

    # --- fields -------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """The named fields and entries; None means all of that kind. Rows, plan and normalizers stay.

        Raises KeyError for an unknown name.
        """
        tensors, objects, meta = self.tensors, self.non_tensor_batch, self.meta_info
        names = known(tensors if batch_keys is None else batch_keys, tensors)
        object_names = known(objects if non_tensor_batch_keys is None else non_tensor_batch_keys, objects)
        meta_names = known(meta if meta_info_keys is None else meta_info_keys, meta)
        return self._with_tensors(
            {name: tensors[name] for name in names},
            non_tensor_batch={name: objects[name] for name in object_names},
            meta_info={name: meta[name] for name in meta_names},
        )

    def select_fields(self, names: Sequence[str]) -> DataProto:
        """These fields, tensors or objects; otherwise as `select`.

        Raises ValueError, with the known names, if the batch lacks one.
        """
        fields = self.to_dict()
        lacking = [name for name in names if name not in fields]
        if lacking:
            raise ValueError(f"the batch lacks {', '.join(lacking)}; it has {', '.join(sorted(fields)) or 'no fields'}")
        tensors = [name for name in names if name in self.tensors]
        return self.select(tensors, [name for name in names if name not in tensors])

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] | None = None,
    ) -> tuple[DataProto, DataProto]:
        """(the named fields, all others), both with all rows; this object stays as it is.

        Both have all of `meta_info`, unless `meta_info_keys` deals it out as well. Raises KeyError for an unknown name.
        """
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self.select(
            [name for name in self.tensors if name not in batch_keys],
            [name for name in self.non_tensor_batch if name not in non_tensor_batch_keys],
            [name for name in self.meta_info if meta_info_keys is None or name not in meta_info_keys],
        )
        return popped, rest

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Fields under other names, in their old places; names may be exchanged. Rows, plan and normalizers stay.

        Raises KeyError for an unknown name; ValueError when the two do not pair up, or two fields would share a name.
        """
        names = new_names(old_keys, new_keys, self.to_dict())
        return self._with_tensors(
            {names[name]: value for name, value in self.tensors.items()},
            non_tensor_batch={names[name]: values for name, values in self.non_tensor_batch.items()},
        )

    def update(self, fields: Mapping[str, Tensor | Sequence[Any] | np.ndarray]) -> DataProto:
        """New fields, and new values of fields, for the same rows. Plan and normalizers stay.

        Raises ValueError for another number of rows, or when a tensor would take the place of objects or vice versa.
        """
        given, empty = DataProto.from_single_dict(fields), self.batch is None and not self.non_tensor_batch
        if not fields:
            return replace(self)
        if len(given) != len(self) and not empty:
            raise ValueError(f"update of {len(self)} rows with fields of {len(given)} rows")
        check_kinds(self.to_dict(), given.to_dict())
        tensors = {**self.tensors, **given.tensors}
        return replace(
            self,
            batch=tensor_dict(tensors, len(given)) if tensors else self.batch,
            non_tensor_batch={**self.non_tensor_batch, **given.non_tensor_batch},
        )

    # --- several batches ----------------------------------------------------------------------------------------------

    @staticmethod
    def concat(pieces: Sequence[DataProto]) -> DataProto:
        """The rows of all pieces in order; the inverse of chunk and split.

        Raises ValueError when there is no piece, or the pieces differ in fields, dtypes, devices, shapes of a row or
        meta_info. Metrics are listed as `roll.protocol.joining` says.
        """
        if not pieces:
            raise ValueError("concat needs at least one piece")
        for number, piece in enumerate(pieces):
            if not isinstance(piece, DataProto):
                raise ValueError(f"concat: piece {number} is a {type(piece).__name__}, not a DataProto")
        without = [piece.batch is None for piece in pieces]
        if any(without) and not all(without):
            raise ValueError(f"concat: of piece 0 and piece {without.index(not without[0])} one has no batch")
        tensors = joining.concat_tensors([piece.tensors for piece in pieces])
        objects = joining.concat_arrays([piece.non_tensor_batch for piece in pieces])
        meta = joining.concat_metas([piece.meta_info for piece in pieces])
        num_rows = sum(map(len, pieces))
        joined = pieces[0]._of_checked(None if without[0] else tensor_dict(tensors, num_rows), objects, meta)
        joined._check_lengths()
        return joined

    @staticmethod
    def materialize_concat(references: Sequence[Any] | Any, timeout: float | None = None) -> DataProto:
        """The rows of pieces that are still remote, fetched and joined; one reference is joined like many.

        Takes what `DataProtoFuture` takes, and raises what its `get` and `concat` raise.
        """
        from roll.protocol.future import DataProtoFuture

        several = isinstance(references, list | tuple)
        return DataProtoFuture.concat(references if several else [references]).get(timeout)

    def union(self, other: DataProto) -> DataProto:
        """The fields and meta data of both, for the same rows.

        Raises ValueError when the numbers of rows differ, or a name has different values in the two.
        """
        if not isinstance(other, DataProto):
            raise ValueError(f"union with a {type(other).__name__}, not a DataProto")
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        tensors = joining.merged(self.tensors, other.tensors, "batch")
        objects = joining.merged(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        return DataProto(
            None if self.batch is None and other.batch is None else tensor_dict(tensors, len(self)),
            objects,
            joining.merged_metas(self.meta_info, other.meta_info),
            joining.either(self.plan, other.plan, "plan"),
            joining.either(self.normalizers, other.normalizers, "normalizers"),
        )

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything into one file, which appears whole or not at all; its folder must exist."""
        storage.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> DataProto:
        """What `save` wrote, tensors on the CPU.

        The objects are a pickle, and reading a pickle runs what it says: load only files that you trust.

        Raises ValueError if the file is none that `save` wrote, or not as it wrote it.
        """
        return cast("DataProto", storage.load(path))
