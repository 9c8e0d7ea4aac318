"""A result that stays with the worker that made it, until someone fetches its rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray

    from roll.protocol import DataProto
    from roll.workers.cluster import Cluster


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
        import ray

        return cls(ray.put(batch), len(batch), batch[:0])

    def held_by(self, cluster: Cluster) -> RemoteBatch:
        """The same, on the driver, which knows whose workers hold the rows."""
        assert not isinstance(self.ref, HeldRows)
        return replace(self, ref=HeldRows(self.ref, cluster))


@dataclass(frozen=True)
class HeldRows:
    """A reference on the driver, with the cluster whose workers hold the rows. Only the reference travels on."""

    ref: ray.ObjectRef
    cluster: Cluster

    def future(self) -> Future[Any]:
        self.check()
        future: Future[Any] = self.ref.future()
        return future

    def check(self) -> None:
        """Raise WorkerError if the rows went with the workers that held them."""
        from roll.workers.failure import WorkerError  # which loads Ray; `roll.workers.routing` imports this module

        if self.cluster.stopped:
            raise WorkerError(f"the rows were with the workers of {self.cluster.role}, which have been stopped")

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.ref,)


def _itself(ref: ray.ObjectRef) -> ray.ObjectRef:
    return ref


def check_held(values: Iterable[Any]) -> None:
    """Raise WorkerError if a DataProtoFuture among the arguments of a call has rows of a cluster that was stopped."""
    future = sys.modules.get("roll.protocol.future")  # Loaded with the first value that is one.
    if future is None:
        return
    for value in values:
        if isinstance(value, future.DataProtoFuture):
            for reference in value.references():
                if isinstance(reference, HeldRows):
                    reference.check()
