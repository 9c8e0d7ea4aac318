"""DataProto: a batch of rows, as it travels between driver, workers and strategies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, overload

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from roll.protocol.normalizers import LossNormalizers
from roll.protocol.plan import MicroBatchPlan
from roll.protocol.rows import RowIndex, object_array, resolve_rows, same_value, take_rows

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class DataProto:
    """Rows with tensors, Python objects and what holds for all rows. Operations return new objects.

    Example, three rows of four tokens:

        data = DataProto.from_dict({"input_ids": ids}, {"answer": ["4", "7", "1"]}, {"step": 3})
        len(data)                    # 3
        data["input_ids"]            # tensor [3, 4]
        data[1:]                     # DataProto, the last two rows
        DataProto.concat(data.chunk(2))  # the same rows again

    Tensors of a result may be views of the original's (slices, chunks), so treat them as read-only. `meta_info` is
    copied, never shared. `plan` and `normalizers` speak of the rows as they are; operations that change the rows or
    their order (indexing, chunk, split, concat, repeat, iteration) leave them out.

    Raises ValueError when fields have different numbers of rows, a name stands for a tensor and an object field, a
    value is not a tensor or one entry per row, or the plan is for another number of rows.
    """

    batch: TensorDict | None = None
    """Tensors, each [B, ...]; the TensorDict's batch size is [B]. None on a stub."""
    non_tensor_batch: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Object arrays, each [B]."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """What holds for all rows."""
    plan: MicroBatchPlan | None = None
    """Set by the driver; on a share it is still the plan of the whole batch."""
    normalizers: LossNormalizers | None = None
    """Set by the strategy for a training step; counted over the whole step, not over these rows."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # only here: a frozen dataclass normalises its own fields
        if self.batch is not None:
            set_field(self, "batch", _checked_batch(self.batch))
        objects = {name: object_array(values, name) for name, values in self.non_tensor_batch.items()}
        set_field(self, "non_tensor_batch", objects)
        set_field(self, "meta_info", copy.deepcopy(dict(self.meta_info)))
        lengths = self._lengths
        if any(length != len(self) for length in lengths.values()):
            raise ValueError(f"fields must have the same number of rows, got {lengths}")
        both = sorted(self.tensors.keys() & objects.keys())
        if both:
            raise ValueError(f"{', '.join(both)}: given both as tensor and as non-tensor field")
        if self.plan is not None and lengths:
            fitting = {self.plan.num_rows, *(len(rows) for rows in self.plan.rows)}
            if len(self) not in fitting:
                shares = [len(rows) for rows in self.plan.rows]
                raise ValueError(
                    f"a plan of {self.plan.num_rows} rows, shares {shares}, on a batch of {len(self)} rows"
                )

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
            if not isinstance(value, Tensor) or value.ndim == 0:
                raise ValueError(f"{name} must be a tensor [B, ...], got {_describe(value)}")
        lengths = {name: len(tensor) for name, tensor in tensors.items()}
        lengths |= {name: len(values) for name, values in objects.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"fields must have the same number of rows, got {lengths}")
        return cls(_tensor_dict(tensors, next(iter(lengths.values()), 0)), objects, dict(meta_info or {}))

    def __len__(self) -> int:
        """The number of rows; 0 on a stub."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(values) for values in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProto]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        parts = [f"{len(self)} rows"]
        if self.batch is None:
            parts.append("batch=None")
        else:
            fields = ", ".join(f"{name}: {_describe(value)}" for name, value in self.tensors.items())
            parts.append(f"batch={{{fields}}}")
        if self.non_tensor_batch:
            fields = ", ".join(f"{name}: object{list(a.shape)}" for name, a in self.non_tensor_batch.items())
            parts.append(f"non_tensor_batch={{{fields}}}")
        if self.meta_info:
            parts.append(f"meta_info={self.meta_info}")
        if self.plan is not None:
            parts.append(f"plan={self.plan.dp_size} x {self.plan.num_micro_batches} micro-batches")
        if self.normalizers is not None:
            parts.append(f"normalizers={self.normalizers}")
        return f"DataProto({', '.join(parts)})"

    def __reduce__(self) -> tuple[Callable[..., DataProto], tuple[Any, ...]]:
        # A view is pickled alone, not with the storage that it is a view of.
        tensors = None if self.batch is None else {name: _compact(value) for name, value in self.tensors.items()}
        return _unpickle, (tensors, len(self), self.non_tensor_batch, self.meta_info, self.plan, self.normalizers)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name, in a new dict; empty on a stub."""
        return {} if self.batch is None else cast("dict[str, Tensor]", dict(self.batch.items()))

    @property
    def _lengths(self) -> dict[str, int]:
        fields: dict[str, Any] = {**self.tensors, **self.non_tensor_batch}
        return {name: len(values) for name, values in fields.items()}

    def _with_rows(self, num_rows: int, change: Callable[[Any], Any]) -> DataProto:
        """Every field changed in its rows; without plan and normalizers, which spoke of the rows before."""
        tensors = {name: change(value) for name, value in self.tensors.items()}
        return DataProto(
            None if self.batch is None else _tensor_dict(tensors, num_rows),
            {name: change(values) for name, values in self.non_tensor_batch.items()},
            self.meta_info,
        )

    @overload
    def __getitem__(self, index: str) -> Any: ...
    @overload
    def __getitem__(self, index: RowIndex) -> DataProto: ...
    def __getitem__(self, index: str | RowIndex) -> Any:
        """A field by name (tensor or object array), or rows by number, slice, list, array or mask as a DataProto.

        Raises KeyError for an unknown name, IndexError for a row that does not exist.
        """
        if isinstance(index, str):
            fields: dict[str, Any] = {**self.tensors, **self.non_tensor_batch}
            return fields[_known([index], fields)[0]]
        rows = resolve_rows(index, len(self))
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        return self._with_rows(count, lambda values: take_rows(values, rows))

    def select_idxs(self, rows: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """These rows in this order, by number or by mask."""
        return self[rows]

    def select(
        self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None
    ) -> DataProto:
        """The named fields; None means all of that kind. Rows, plan and normalizers stay."""
        tensors = self.tensors
        names = _known(tensors if batch_keys is None else batch_keys, tensors)
        objects = _known(
            self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys, self.non_tensor_batch
        )
        batch = None if self.batch is None else _tensor_dict({name: tensors[name] for name in names}, len(self))
        return replace(self, batch=batch, non_tensor_batch={name: self.non_tensor_batch[name] for name in objects})

    def pop(
        self, batch_keys: Sequence[str] = (), non_tensor_batch_keys: Sequence[str] = ()
    ) -> tuple[DataProto, DataProto]:
        """(the named fields, all others), both with all rows; this object stays as it is."""
        popped = self.select(batch_keys, non_tensor_batch_keys)
        rest = self.select(
            [name for name in self.tensors if name not in batch_keys],
            [name for name in self.non_tensor_batch if name not in non_tensor_batch_keys],
        )
        return popped, rest

    def union(self, other: DataProto) -> DataProto:
        """The fields and meta data of both, for the same rows.

        Raises ValueError when the numbers of rows differ, or a name has different values in the two.
        """
        if len(self) != len(other):
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        tensors = _merged(self.tensors, other.tensors, "batch")
        objects = _merged(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        return DataProto(
            None if self.batch is None and other.batch is None else _tensor_dict(tensors, len(self)),
            objects,
            _merged(self.meta_info, other.meta_info, "meta_info"),
            _either(self.plan, other.plan, "plan"),
            _either(self.normalizers, other.normalizers, "normalizers"),
        )

    def chunk(self, chunks: int) -> list[DataProto]:
        """Consecutive pieces whose sizes differ by one at most, the larger first; empty ones when rows are too few."""
        if chunks < 1:
            raise ValueError(f"chunk needs at least 1 chunk, got {chunks}")
        size, larger = divmod(len(self), chunks)
        ends = [(i + 1) * size + min(i + 1, larger) for i in range(chunks)]
        return [self[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def split(self, size: int) -> list[DataProto]:
        """Consecutive pieces of `size` rows, the last perhaps smaller; an empty batch is one empty piece."""
        if size < 1:
            raise ValueError(f"split needs pieces of at least 1 row, got {size}")
        return [self[begin : begin + size] for begin in range(0, max(len(self), 1), size)]

    @staticmethod
    def concat(pieces: Sequence[DataProto]) -> DataProto:
        """The rows of all pieces in order; the inverse of chunk and split.

        Raises ValueError when there is no piece, or the pieces differ in fields, dtypes, shapes of a row or meta_info.
        """
        if not pieces:
            raise ValueError("concat needs at least one piece")
        first = pieces[0]
        for number, piece in enumerate(pieces):
            _check_concat(first, piece, number)
        tensors = {name: torch.cat([piece[name] for piece in pieces]) for name in first.tensors}
        objects = {name: np.concatenate([piece[name] for piece in pieces]) for name in first.non_tensor_batch}
        num_rows = sum(len(piece) for piece in pieces)
        return DataProto(None if first.batch is None else _tensor_dict(tensors, num_rows), objects, first.meta_info)

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Every row `times` times: 0 0 1 1 with `interleave`, else 0 1 0 1."""
        if times < 0:
            raise ValueError(f"repeat needs a number of times of at least 0, got {times}")
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(times) if interleave else rows.repeat(times)]

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Mini-batches of all rows, `epochs` times: in order, or in an order drawn anew each epoch from `seed`.

        Raises ValueError, at once, when the rows are not a multiple of `mini_batch_size`.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise ValueError(f"{len(self)} rows are not a multiple of mini_batch_size {mini_batch_size}")
        if epochs < 0:
            raise ValueError(f"epochs must be at least 0, got {epochs}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)

        def mini_batches() -> Iterator[DataProto]:
            for _ in range(epochs):
                count = len(self)
                order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
                yield from (self[rows] for rows in order.split(mini_batch_size) if len(rows))

        return mini_batches()

    def to(self, device: torch.device | str) -> DataProto:
        """The same with all tensors on `device`."""
        if self.batch is None:
            return replace(self)
        moved = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, batch=_tensor_dict(moved, len(self)))

    def clone(self) -> DataProto:
        """A copy that shares no tensor, array or object with this one."""
        objects = copy.deepcopy(dict(self.non_tensor_batch))
        return replace(self, batch=None if self.batch is None else self.batch.clone(), non_tensor_batch=objects)

    def stub(self) -> DataProto:
        """Only meta_info, plan and normalizers: what ranks get that receive the rows from their leader."""
        return replace(self, batch=None, non_tensor_batch={})

    def with_plan(self, plan: MicroBatchPlan | None) -> DataProto:
        """The same rows with this micro-batch plan."""
        return replace(self, plan=plan)

    def with_normalizers(self, normalizers: LossNormalizers | None) -> DataProto:
        """The same rows with these denominators of the loss."""
        return replace(self, normalizers=normalizers)


def _tensor_dict(tensors: Mapping[str, Tensor], num_rows: int) -> TensorDict:
    return TensorDict(dict(tensors), batch_size=[num_rows])


def _unpickle(tensors: dict[str, Tensor] | None, num_rows: int, *fields: Any) -> DataProto:
    return DataProto(None if tensors is None else _tensor_dict(tensors, num_rows), *fields)


def _checked_batch(batch: TensorDict) -> TensorDict:
    """A shallow copy, so that a field added to it does not appear in the caller's."""
    if len(batch.batch_size) != 1:
        raise ValueError(f"batch must have one batch dimension [B], got {list(batch.batch_size)}")
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor [B, ...], got {_describe(value)}")
    return batch.clone(recurse=False)


def _compact(tensor: Tensor) -> Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


def _known(names: Sequence[str] | Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    unknown = [name for name in names if name not in fields]
    if unknown:
        raise KeyError(f"no field {', '.join(unknown)}; there are {', '.join(sorted(fields)) or 'none'}")
    return list(names)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str) -> dict[str, Any]:
    for name in ours.keys() & theirs.keys():
        if not same_value(ours[name], theirs[name]):
            raise ValueError(f"union: {what} has different values of {name}")
    return {**ours, **theirs}


def _either(ours: T | None, theirs: T | None, what: str) -> T | None:
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(f"union: {what} is {ours} and {theirs}")
    return theirs if ours is None else ours


def _check_concat(first: DataProto, piece: DataProto, number: int) -> None:
    if (first.batch is None) != (piece.batch is None):
        raise ValueError(f"concat: of piece 0 and piece {number} one has no batch")
    for what in ("tensors", "non_tensor_batch", "meta_info"):
        ours, theirs = getattr(first, what), getattr(piece, what)
        if ours.keys() != theirs.keys():
            differing = ", ".join(sorted(ours.keys() ^ theirs.keys()))
            raise ValueError(f"concat: {differing} is not in both piece 0 and piece {number}")
    for name, value in first.tensors.items():
        other = piece[name]
        if value.dtype != other.dtype or value.shape[1:] != other.shape[1:]:
            raise ValueError(f"concat: {name} is {_describe(value)} in piece 0, {_describe(other)} in piece {number}")
    for name, value in first.meta_info.items():
        if not same_value(value, piece.meta_info[name]):
            raise ValueError(
                f"concat: meta_info {name} is {value!r} in piece 0, {piece.meta_info[name]!r} in piece {number}"
            )
