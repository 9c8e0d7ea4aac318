"""A result that stays with the worker that made it, until someone fetches its rows."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from roll.protocol.remote_rows import RemoteRows
from roll.workers.errors import WorkerError

if TYPE_CHECKING:
    import ray

    from roll.protocol import DataProto, DataProtoFuture

Keep = Literal["nothing", "result", "reference"]
"""What a worker answers to a call: None, where nobody would read the result; the result; or a RemoteBatch of it."""


class Holder(Protocol):
    """The actors that hold rows."""

    role: str

    @property
    def stopped(self) -> bool:
        """Whether the actors, and so the rows, are gone."""


@dataclass(frozen=True)
class RemoteBatch:
    """Place and head of a batch, which the driver is told instead of the rows."""

    ref: ray.ObjectRef | HeldRows
    num_rows: int
    head: DataProto
    """The fields and the meta_info, without a row."""

    @classmethod
    def leave(cls, batch: DataProto) -> RemoteBatch:
        """Put a batch into this process's object store. It is lost when the process ends."""
        import ray  # Here, since the arithmetic of `roll.workers.routing` needs this module and no Ray.

        return cls(ray.put(batch), len(batch), batch[:0])

    def held_by(self, holder: Holder) -> RemoteBatch:
        """The same, on the driver, which knows whose workers hold the rows."""
        assert not isinstance(self.ref, HeldRows)
        return replace(self, ref=HeldRows(self.ref, holder))


@dataclass(frozen=True)
class HeldRows:
    """A reference on the driver, with the actors that hold the rows. Only the reference travels on."""

    ref: ray.ObjectRef
    holder: Holder

    def future(self) -> Future[Any]:
        self.check()
        future: Future[Any] = self.ref.future()
        return future

    def check(self) -> None:
        """Raise WorkerError if the rows went with the workers that held them."""
        if self.holder.stopped:
            raise WorkerError(f"the rows were with the workers of {self.holder.role}, which have been stopped")

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.ref,)


def _itself(ref: ray.ObjectRef) -> ray.ObjectRef:
    return ref


def as_batch(rows: DataProtoFuture) -> DataProto:
    """Remote rows as an argument of a role's method, typed as the DataProto that the ranks will have fetched."""
    return cast("DataProto", rows)


def check_held(values: Iterable[Any]) -> None:
    """Raise WorkerError if a DataProtoFuture among the arguments of a call has rows of actors that were stopped."""
    for value in values:
        if isinstance(value, RemoteRows):
            for reference in value.references():
                if isinstance(reference, HeldRows):
                    reference.check()
