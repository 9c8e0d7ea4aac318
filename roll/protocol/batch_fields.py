"""The operations on the fields of a batch: by name, for the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypeVar

import numpy as np
from torch import Tensor

from roll.errors import UserError
from roll.protocol.batch_data import BatchData
from roll.protocol.field_names import check_kinds, known, listed, new_names
from roll.protocol.tensors import tensor_dict

Names = str | Iterable[str]
"""One name, or several in a list, a tuple or a set."""
BatchT = TypeVar("BatchT")


class Parted(NamedTuple, Generic[BatchT]):
    """Both parts of what `pop` parts."""

    popped: BatchT
    rest: BatchT

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"pop gives two batches, so no {name}: popped, rest = data.pop(...)")


class BatchFields(BatchData):
    """A batch whose fields are chosen, added and renamed. Rows, plan and normalizers stay."""

    def select(
        self,
        batch_keys: Names | None = None,
        non_tensor_batch_keys: Names | None = None,
        meta_info_keys: Names | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named fields and entries; None means all of that kind. With `deepcopy`, a `clone` of them.

        Raises UnknownName, a KeyError, for an unknown name.
        """
        tensors, objects, meta = self.tensors, self.non_tensor_batch, self.meta_info
        names = known(tensors if batch_keys is None else batch_keys, tensors)
        object_names = known(objects if non_tensor_batch_keys is None else non_tensor_batch_keys, objects)
        meta_names = known(meta if meta_info_keys is None else meta_info_keys, meta, "meta_info")
        chosen = self._with_tensors(
            {name: tensors[name] for name in names},
            non_tensor_batch={name: objects[name] for name in object_names},
            meta_info={name: meta[name] for name in meta_names},
        )
        return chosen.clone() if deepcopy else chosen

    def select_fields(self, names: Names) -> Self:
        """These fields, tensors or objects; otherwise as `select`."""
        chosen = known(names, self.to_dict())
        tensors = [name for name in chosen if name in self.tensors]
        return self.select(tensors, [name for name in chosen if name not in tensors])

    def pop(
        self,
        batch_keys: Names | None = None,
        non_tensor_batch_keys: Names | None = None,
        meta_info_keys: Names | None = None,
    ) -> Parted[Self]:
        """(the named fields, all others), both with all rows; this batch stays as it is.

        Both have all of `meta_info`, unless `meta_info_keys` deals it out as well. Raises UnknownName, a KeyError, for
        an unknown name.
        """
        names, object_names, meta_names = map(listed, (batch_keys, non_tensor_batch_keys, meta_info_keys))
        rest = self.select(
            [name for name in self.tensors if name not in names],
            [name for name in self.non_tensor_batch if name not in object_names],
            [name for name in self.meta_info if name not in meta_names],
        )
        popped = self.select(names, object_names, None if meta_info_keys is None else meta_names)
        return Parted(popped, rest)

    def rename(self, old_keys: Names | None = None, new_keys: Names | None = None) -> Self:
        """Fields under other names, in their old places; names may be exchanged.

        Raises UnknownName, a KeyError, for an unknown name; ValueError when the two do not pair up, or two fields would
        share a name.
        """
        names = new_names(old_keys, new_keys, self.to_dict())
        return self._with_tensors(
            {names[name]: value for name, value in self.tensors.items()},
            non_tensor_batch={names[name]: values for name, values in self.non_tensor_batch.items()},
        )

    def update(self, other: Mapping[str, Tensor | Sequence[Any] | np.ndarray]) -> Self:
        """New fields, and new values of fields, for the same rows.

        Raises ValueError for another number of rows, or when a tensor would take the place of objects or vice versa.
        """
        given = BatchData.from_single_dict(other)
        if not other:
            return replace(self)
        if len(given) != len(self) and (self.batch is not None or self.non_tensor_batch):
            raise UserError(f"update of {len(self)} rows with fields of {len(given)} rows")
        check_kinds(self.to_dict(), given.to_dict())
        tensors = {**self.tensors, **given.tensors}
        device = None if self.batch is None else self.batch.device
        return replace(
            self,
            batch=tensor_dict(tensors, len(given), device) if tensors else self.batch,
            non_tensor_batch={**self.non_tensor_batch, **given.non_tensor_batch},
        )
