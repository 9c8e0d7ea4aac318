"""Messages of a delivery: the report of each rank, and the decision of the leader."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll.errors import UserError
from roll.protocol.data_proto import DataProto
from roll.protocol.digest import digest
from roll.protocol.metrics import without_metrics
from roll.protocol.normalizers import LossNormalizers
from roll.protocol.plan import MicroBatchPlan
from roll.protocol.roll_call import MissingRanks
from roll.protocol.wire import Specs, specs_of

_META = "meta_info "  # so that an entry of meta_info is never taken for the plan or the normalizers
_NORMALIZERS, _PLAN = "normalizers", "micro-batch plan"


@dataclass(frozen=True)
class RankReport:
    """The batch that a rank brings to a call, in short."""

    error: str | None = None
    """Defect of the batch on this rank; all other fields are empty then."""
    specs: Specs | None = None
    """Tensors of its rows; None for a stub."""
    objects: tuple[str, ...] = ()
    """Names in `non_tensor_batch`."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Digest of each entry that is equal on all ranks after the delivery; see `shared_entries`."""

    @classmethod
    def of(cls, batch: DataProto) -> RankReport:
        """The report of a batch. A batch with any defect becomes a report with `error`: nothing is raised."""
        try:
            if not isinstance(batch, DataProto):
                raise UserError(f"a DataProto is delivered, got {type(batch).__name__}")
            batch.check_consistency()
            specs = None if batch.batch is None else specs_of(batch.tensors)
            return cls(None, specs, tuple(sorted(batch.non_tensor_batch)), _digests(shared_entries(batch)))
        except Exception as error:  # noqa: BLE001 - whatever it is: the others wait, and must hear of it
            return cls(message_of(error))


@dataclass(frozen=True)
class Decision:
    """The leader's answer to all ranks: a header of the bytes that follow, or a refusal."""

    error: str | None = None
    """Why nothing follows; all fields but `missing` are empty then."""
    missing: tuple[int, ...] | None = None
    """Global ranks that did not come, if that is the error."""
    specs: Specs = ()
    """Tensors that follow."""
    num_rows: int = 0
    """B, for batches without tensors too."""
    non_tensor: bool = False
    """Whether `non_tensor_batch` follows the tensors."""
    rows: bytes | None = None
    """The bytes themselves, where they are few enough to come along with the decision; None: they follow."""
    object_bytes: int = 0
    """Size of the pickled `non_tensor_batch`."""
    lacking: bytes = b""
    """Pickle of the shared entries that some rank came without, by name; empty if there are none."""
    closing: bool = False
    """Whether ranks unpickle something, and so report once more after the bytes."""

    @classmethod
    def refusal(cls, error: Exception) -> Decision:
        """A decision that raises this error on every rank."""
        return cls(error=message_of(error), missing=error.ranks if isinstance(error, MissingRanks) else None)

    @classmethod
    def refusal_of_share(cls, dp: int, refused: Decision) -> Decision:
        """The refusal of data-parallel share `dp`, in the words for the other shares."""
        if refused.missing is not None:
            return refused
        return cls(error=f"the batch of data-parallel rank {dp} was refused: {refused.error}")

    def as_exception(self) -> UserError | MissingRanks:
        """The error that every rank raises on a refusal."""
        assert self.error is not None
        return UserError(self.error) if self.missing is None else MissingRanks(self.error, self.missing)


def message_of(error: Exception) -> str:
    """The text by which other ranks hear of an error."""
    return str(error) if isinstance(error, (ValueError, MissingRanks)) else f"{type(error).__name__}: {error}"


def shared_entries(batch: DataProto) -> dict[str, Any]:
    """Entries that a delivery makes equal, by the name that messages use: meta_info, normalizers, micro-batch plan.

    `metrics` is left out: each rank keeps its own, so that a sum over ranks counts none twice. The plan is among them
    because ranks with different plans would wait for each other's micro-batches.
    """
    entries = {f"{_META}{name}": value for name, value in without_metrics(batch.meta_info).items()}
    typed = {_NORMALIZERS: batch.normalizers, _PLAN: batch.plan}
    return entries | {name: value for name, value in typed.items() if value is not None}


def with_shared_entries(batch: DataProto, entries: Mapping[str, Any]) -> DataProto:
    """The batch with these entries of `shared_entries` beside its own; its own stay where both have one."""
    missing = {name: value for name, value in entries.items() if name not in shared_entries(batch)}
    meta = {name.removeprefix(_META): value for name, value in missing.items() if name.startswith(_META)}
    return replace(
        batch,
        meta_info={**meta, **batch.meta_info},
        plan=missing.get(_PLAN, batch.plan),
        normalizers=missing.get(_NORMALIZERS, batch.normalizers),
    )


def pickled_lacking(batch: DataProto, others: Sequence[RankReport]) -> bytes:
    """The shared entries of the leader's `batch` that one of the other ranks lacks, as `Decision.lacking`."""
    entries = shared_entries(batch)
    lacking = {name: value for name, value in entries.items() if any(name not in other.shared for other in others)}
    return pickle.dumps(lacking) if lacking else b""


def _digests(entries: Mapping[str, Any]) -> dict[str, str]:
    """Raises ValueError, with the entry's name, for a value that cannot be pickled."""
    found = {}
    for name, value in entries.items():
        try:
            found[name] = digest(_plain(value))
        except ValueError as refused:
            raise UserError(f"{name} {refused}") from refused
    return found


def _plain(value: Any) -> Any:
    """A plan or normalizers without what they cache, which may differ between equal ones."""
    if isinstance(value, MicroBatchPlan):
        return value.shares, value.rows
    return (value.tokens, value.sequences) if isinstance(value, LossNormalizers) else value
