"""DataProto: a batch of rows, as it travels between driver, workers and strategies.

roll.protocol.batch_data     the fields, what always holds of them, copies, devices, bytes
roll.protocol.batch_rows     taking, cutting, repeating, ordering and grouping rows
roll.protocol.batch_fields   choosing, adding and renaming fields
here                         all of it, and several batches that become one
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, NoReturn, Self, TypeVar

from tensordict import TensorDict

from roll.errors import UserError
from roll.protocol import joining, storage
from roll.protocol.batch_fields import BatchFields
from roll.protocol.batch_rows import BatchRows
from roll.protocol.field_names import listed
from roll.protocol.future import DataProtoFuture
from roll.protocol.tensordict_form import parts_of_tensordict, to_tensordict
from roll.protocol.tensors import tensor_dict

DataProtoT = TypeVar("DataProtoT", bound="DataProto")


class DataProto(BatchRows, BatchFields):
    """Rows with tensors, Python objects and what holds for all rows.

    Example, three rows of four tokens:

        data = DataProto.from_dict({"input_ids": ids}, {"answer": ["4", "7", "1"]}, {"step": 3})
        len(data)                    # 3
        data["input_ids"]            # tensor [3, 4]
        data[1:]                     # DataProto, the last two rows
        data[-1]                     # DataProto, the last row alone
        DataProto.concat(data.chunk(2))  # the same rows again

    Every method returns something new and leaves this object and its arguments as they are; also `pop`, `union`,
    `rename`, `reorder` and `to`, which in ROLL and verl change the batch in place. What is returned is of this object's
    class. Tensors are not copied: a batch has those that it was made of, and those of a result may be views of them
    (slices, chunks) or the same (`select`, `union`), so treat them as read-only; `clone` copies all. Arrays of objects
    are copied when a batch is made, the objects are not. `meta_info` is copied, never shared; its entry `metrics` is
    joined as `roll.protocol.joining` says. `plan` and `normalizers` speak of the rows as they are: operations that
    change the rows or their order (indexing, chunk, split, concat, repeat, reorder, padding, grouping, iteration) leave
    them out. A batch without rows is legal for every method.
    """

    # --- several batches ----------------------------------------------------------------------------------------------

    @staticmethod
    def concat(data: Sequence[DataProtoT], *, global_keys: str | Iterable[str] | None = None) -> DataProtoT:
        """The rows of all pieces in order; the inverse of chunk and split.

        Args:
            data: the pieces.
            global_keys: entries of meta_info that may differ: the result lists the values of all pieces that have them,
                one per piece, lists and tuples too; of a dict, it lists each entry.

        Raises ValueError when there is no piece, or the pieces differ in fields, dtypes, devices, shapes of a row or
        another entry of meta_info.
        """
        if not data:
            raise UserError("concat needs at least one piece")
        for number, piece in enumerate(data):
            if not isinstance(piece, DataProto):
                raise UserError(f"concat: piece {number} is a {type(piece).__name__}, not a DataProto")
        without = [piece.batch is None for piece in data]
        # Rows of objects alone are joined, whether their batch is empty or none.
        of_objects = data[0].non_tensor_batch and not any(piece.tensors for piece in data)
        if any(without) and not all(without) and not of_objects:
            raise UserError(f"concat: of piece 0 and piece {without.index(not without[0])} one has no batch")
        tensors = joining.concat_tensors([piece.tensors for piece in data])
        objects = joining.concat_arrays([piece.non_tensor_batch for piece in data])
        meta = joining.concat_metas([piece.meta_info for piece in data], listed(global_keys))
        joined = data[0]._like(tensors, objects, sum(map(len, data)), meta)
        joined._check_lengths()
        return joined

    @staticmethod
    def materialize_concat(
        data_refs: Sequence[Any] | Any,
        timeout: float | None = None,
        *,
        global_keys: str | Iterable[str] | None = None,
    ) -> DataProto:
        """The rows of pieces that are still remote, fetched and joined; one reference is joined like many.

        Takes what `DataProtoFuture` takes, and raises what its `get` and `concat` raise.
        """
        several = isinstance(data_refs, list | tuple)
        return DataProtoFuture.concat(data_refs if several else [data_refs]).get(timeout, global_keys=global_keys)

    def union(self, other: DataProto) -> Self:
        """The fields and meta data of both, for the same rows.

        Raises ValueError when the numbers of rows differ, or a name has different values in the two.
        """
        if not isinstance(other, DataProto):
            raise UserError(f"union with a {type(other).__name__}, not a DataProto")
        if len(self) != len(other):
            raise UserError(f"union of {len(self)} and {len(other)} rows")
        tensors = joining.merged(self.tensors, other.tensors, "batch")
        devices = [batch.device for batch in (self.batch, other.batch) if batch is not None and batch.device]
        device = devices[0] if devices else None
        return replace(
            self,
            batch=None if self.batch is None and other.batch is None else tensor_dict(tensors, len(self), device),
            non_tensor_batch=joining.merged(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch"),
            meta_info=joining.merged_metas(self.meta_info, other.meta_info),
            plan=joining.either(self.plan, other.plan, "plan"),
            normalizers=joining.either(self.normalizers, other.normalizers, "normalizers"),
        )

    # --- other forms --------------------------------------------------------------------------------------------------

    def to_tensordict(self) -> TensorDict:
        """This batch as `roll.protocol.to_tensordict` makes it."""
        return to_tensordict(self)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> Self:
        """The batch whose parts `parts_of_tensordict` finds, of this class; raises what it raises."""
        return cls(*parts_of_tensordict(tensor_dict, meta_info))

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write everything into one file, which appears whole or not at all; its folder must exist."""
        storage.save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """What `save_to_disk` wrote, tensors on the CPU.

        The objects are a pickle, and reading a pickle runs what it says: load only files that you trust.

        Raises ValueError if the file is none that `save_to_disk` wrote, or not as it wrote it.
        """
        return storage.load(filepath, DataProto)

    save, load = save_to_disk, load_from_disk

    # --- changes in place, which there are none of --------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        known = name in (part.name for part in fields(self))
        change = f"{name}=..." if known else f"meta_info={{**data.meta_info, {name!r}: ...}}"
        raise FrozenInstanceError(
            f"a batch is not changed in place: for data.{name} = ..., write data = dataclasses.replace(data, {change})"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(
            f"a batch is not changed in place: {name} cannot be deleted; data.select(...) leaves out"
        )

    def __setitem__(self, name: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"a batch is not changed in place: for data[{name!r}] = ..., write data = data.update({{{name!r}: ...}})"
        )

    def __delitem__(self, name: Any) -> NoReturn:
        raise TypeError(
            f"a batch is not changed in place: for del data[{name!r}], write popped, data = data.pop([{name!r}])"
        )
