"""What a DataProto consists of, and what always holds of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, SupportsIndex, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from roll.errors import UserError
from roll.protocol import display, joining, storage
from roll.protocol.normalizers import LossNormalizers
from roll.protocol.plan import MicroBatchPlan
from roll.protocol.rows import object_array
from roll.protocol.tensors import check_tensor, own_tensors, tensor_dict

BROADCAST_NON_TENSOR = "_broadcast_non_tensor_batch"
"""The documented key of meta_info that `broadcast_non_tensor` reads."""
AUTO_PADDING = "_verl_auto_padding"
"""The key of meta_info that `is_padding_enabled` reads; verl's, so that its batches bring it along."""
MICRO_BATCH_SIZE = "micro_batch_size"
"""The documented key of meta_info that `micro_batch_size` reads."""


@dataclass(frozen=True, eq=False, repr=False, init=False)
class BatchData:
    """The fields of a `DataProto`, without the operations on rows and names.

    Args:
        batch: tensors [B, ...]: a dict, or a TensorDict of batch size [B]. None on a stub.
        non_tensor_batch: for each name a list or an array of B objects.
        meta_info: entries that hold for all rows.
        plan: the micro-batch plan.
        normalizers: the denominators of a step's loss.

    The device of `batch`, if it has one, is kept by every method; `to` sets it.

    Raises ValueError when fields have different numbers of rows, a name stands for a tensor and an object field, a
    value is not a tensor or one entry per row, or the plan is for another number of rows.
    """

    batch: TensorDict | None = None
    """Tensors, each [B, ...]; the TensorDict's batch size is [B]. None on a stub."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Object arrays, each [B]."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """What holds for all rows."""
    plan: MicroBatchPlan | None = None
    """Set by the driver; on a share it is still the plan of the whole batch."""
    normalizers: LossNormalizers | None = None
    """Set by the strategy for a training step; counted over the whole step, not over these rows."""

    def __init__(
        self,
        batch: Mapping[str, Tensor] | None = None,
        non_tensor_batch: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        plan: MicroBatchPlan | None = None,
        normalizers: LossNormalizers | None = None,
    ) -> None:
        given = {
            "batch": batch,
            "non_tensor_batch": non_tensor_batch,
            "meta_info": meta_info,
            "plan": plan,
            "normalizers": normalizers,
        }
        vars(self).update(given)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Take own copies and check them. Apart from `__init__` for the sake of subclasses that are dataclasses."""
        objects = {name: object_array(values, name) for name, values in (self.non_tensor_batch or {}).items()}
        tensors = None if self.batch is None else own_tensors(self.batch, objects)
        vars(self).update(batch=tensors, non_tensor_batch=objects, meta_info=joining.own_meta(self.meta_info or {}))
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of these tensors [B, ...] and lists or arrays of length B.

        With `auto_padding`, `is_padding_enabled` holds of it. Raises ValueError if `num_batch_dims` is not 1.
        """
        if num_batch_dims != 1:
            raise UserError(
                f"num_batch_dims={num_batch_dims}: rows are one dimension; flatten(0, {num_batch_dims - 1})"
            )
        meta = {**(meta_info or {}), **({AUTO_PADDING: True} if auto_padding else {})}
        return cls({} if tensors is None else dict(tensors.items()), non_tensors, meta)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | Sequence[Any] | np.ndarray],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of these fields: tensors go to `batch`, lists and arrays to `non_tensor_batch`. See `to_dict`."""
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        objects = {name: value for name, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, objects, meta_info, auto_padding=auto_padding)

    def _like(
        self,
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, np.ndarray],
        num_rows: int,
        meta: dict[str, Any] | None = None,
    ) -> Self:
        """Other rows, with this meta_info or a copy of its own, and without plan and normalizers.

        The parts are this batch's own and fit together, so they are not checked again, which would cost more.
        """
        made = object.__new__(type(self))
        batch = None if self.batch is None else tensor_dict(tensors, num_rows, self.batch.device)
        meta = joining.own_meta(self.meta_info) if meta is None else meta
        own = {"batch": batch, "non_tensor_batch": objects, "meta_info": meta, "plan": None, "normalizers": None}
        vars(made).update(vars(self) | own)
        return made

    def check_consistency(self) -> None:
        """What always holds; to be called again after `batch` or one of the dicts was changed by hand.

        Raises ValueError, as the class says.
        """
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise UserError(f"batch must have one batch dimension [B], got {list(self.batch.batch_size)}")
        tensors, count = self.tensors, len(self)
        for name, value in tensors.items():
            check_tensor(name, value)
        for name, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or values.dtype != object or values.ndim != 1:
                raise UserError(f"{name} must be an object array [B], got {type(values).__name__}")
        lengths = {name: len(values) for name, values in self.to_dict().items()}
        if any(length != count for length in lengths.values()):
            raise UserError(f"fields must have the same number of rows, got {lengths}")
        both = sorted(tensors.keys() & self.non_tensor_batch.keys())
        if both:
            raise UserError(f"{', '.join(both)}: given both as tensor and as non-tensor field")
        if self.plan is not None and lengths:
            shares = [len(rows) for rows in self.plan.rows]
            if count not in {self.plan.num_rows, *shares}:
                raise UserError(f"a plan of {self.plan.num_rows} rows, shares {shares}, on a batch of {count} rows")
        for key in (BROADCAST_NON_TENSOR, AUTO_PADDING):
            _checked_flag(self.meta_info, key)
        _checked_micro_batch_size(self.meta_info)

    def _check_lengths(self) -> None:
        """Before rows are taken: what was put into `non_tensor_batch` by hand may have another number of them."""
        count = len(self)
        if any(len(values) != count for values in self.non_tensor_batch.values()):
            self.check_consistency()

    def __len__(self) -> int:
        """The number of rows; 0 on a stub."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(values) for values in self.non_tensor_batch.values()), 0)

    def __contains__(self, name: str) -> bool:
        """Whether there is a field of this name."""
        return name in self.tensors or name in self.non_tensor_batch

    def __repr__(self) -> str:
        return display.one_line(self)

    def describe(self) -> str:
        """A table to print: dtype, shape, bytes and a summary of the values of each field."""
        return display.table(self)

    def get_data_info(self) -> str:
        """`describe`, under verl's name."""
        return self.describe()

    def print_size(self, prefix: str = "") -> None:
        """Print the bytes of the tensors, and of the references to the objects, after `prefix`."""
        print(display.sizes(self, prefix))  # noqa: T201 - verl's name for a method that prints

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name, in a new dict; empty on a stub."""
        return {} if self.batch is None else cast("dict[str, Tensor]", dict(self.batch.items()))

    def to_dict(self) -> dict[str, Tensor | np.ndarray]:
        """All fields by name, in a new dict: tensors, then object arrays."""
        return {**self.tensors, **self.non_tensor_batch}

    # --- what goes along with the rows --------------------------------------------------------------------------------

    def stub(self) -> Self:
        """Only meta_info, plan and normalizers: what ranks get that receive the rows from their leader."""
        return replace(self, batch=None, non_tensor_batch={})

    def with_plan(self, plan: MicroBatchPlan | None) -> Self:
        """The same rows with this micro-batch plan. Raises ValueError if it is for another number of rows."""
        return replace(self, plan=plan)

    def with_normalizers(self, normalizers: LossNormalizers | None) -> Self:
        """The same rows with these denominators of the loss."""
        return replace(self, normalizers=normalizers)

    @property
    def broadcast_non_tensor(self) -> bool:
        """Whether `get_data_input` gives `non_tensor_batch` to all ranks too, and not the tensors alone.

        It is kept as `meta_info["_broadcast_non_tensor_batch"]`, the key that people know. Raises ValueError if that is
        neither True nor False.
        """
        return _checked_flag(self.meta_info, BROADCAST_NON_TENSOR)

    def with_broadcast_non_tensor(self, wanted: bool = True) -> Self:
        """The same rows, with `broadcast_non_tensor` set. Raises ValueError if `wanted` is neither True nor False."""
        return replace(self, meta_info={**self.meta_info, BROADCAST_NON_TENSOR: wanted})

    def is_padding_enabled(self) -> bool:
        """Whether these rows are filled up for a worker method that splits them, where they do not divide.

        It holds for methods that return a batch, from which the added rows are taken off again. It is set by
        `from_dict(auto_padding=True)`.
        """
        return _checked_flag(self.meta_info, AUTO_PADDING)

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of a micro-batch, where no plan comes with the batch; None leaves it to the strategy's settings.

        It is kept as `meta_info["micro_batch_size"]`, the documented key. Raises ValueError for anything but None and
        an integer of at least 1.
        """
        return _checked_micro_batch_size(self.meta_info)

    # --- copies, devices, bytes ---------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Self:
        """The same with all tensors, and so `batch`, on `device`."""
        tensors = {name: value.to(device) for name, value in self.tensors.items()}
        batch = None if self.batch is None else tensor_dict(tensors, len(self), torch.device(device))
        return replace(self, batch=batch)

    def clone(self) -> Self:
        """A copy that shares nothing with this one. Raises ValueError for objects that cannot be copied."""
        tensors = {name: value.clone() for name, value in self.tensors.items()}
        objects = {name: joining.own_copy(values, name) for name, values in self.non_tensor_batch.items()}
        return self._with_tensors(tensors, non_tensor_batch=objects)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As `clone`: tensors stay on their device and in their graph, which the bytes of `__reduce_ex__` leave."""
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        tensors = None
        if self.batch is not None:
            tensors = {name: storage.packed(value, int(protocol)) for name, value in self.tensors.items()}
        rest = (getattr(self, part.name) for part in fields(self) if part.name != "batch")
        placed = self.batch is not None and self.batch.device is not None
        return _unpickle_placed if placed else _unpickle, (type(self), tensors, len(self), *rest)

    def _with_tensors(self, tensors: Mapping[str, Tensor], **changes: Any) -> Self:
        """Other tensors for the same rows (a stub stays one), and `changes` of other fields of this class."""
        batch = None if self.batch is None else tensor_dict(tensors, len(self), self.batch.device)
        return replace(self, batch=batch, **changes)


def _checked_flag(meta_info: Mapping[str, Any], key: str) -> bool:
    flag = meta_info.get(key, False)
    if not isinstance(flag, bool):
        raise UserError(f"meta_info {key} must be True or False, got {flag!r}")
    return flag


def _checked_micro_batch_size(meta_info: Mapping[str, Any]) -> int | None:
    rows = meta_info.get(MICRO_BATCH_SIZE)
    if rows is not None and (not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 1):
        raise UserError(f"meta_info {MICRO_BATCH_SIZE} must be an integer of at least 1, got {rows!r}")
    return None if rows is None else int(rows)


def _unpickle(
    cls: type[BatchData], tensors: dict[str, storage.PackedTensor] | None, num_rows: int, *rest: Any
) -> BatchData:
    """A batch whose TensorDict has no device; `rest` are the fields of the class after `batch`, in their order."""
    names = [part.name for part in fields(cls) if part.name != "batch"]
    others = dict(zip(names, rest, strict=True))
    if tensors is None:
        return cls(None, **others)
    return cls(tensor_dict({name: storage.unpacked(*parts) for name, parts in tensors.items()}, num_rows), **others)


def _unpickle_placed(cls: type[BatchData], *parts: Any) -> BatchData:
    """A batch whose TensorDict has a device, which is the CPU now: values arrive there."""
    return _unpickle(cls, *parts).to("cpu")
