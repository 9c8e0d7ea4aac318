"""Results that stay where they are: the driver holds references, and the next cluster fetches the rows it needs."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.workers.parcel import unwrap, wrap

if TYPE_CHECKING:
    import ray

    from roll.protocol import DataProto


@dataclass(frozen=True)
class RemoteBatch:
    """A batch in the object store of the worker that made it; a reference as `DataProtoFuture` takes it."""

    ref: ray.ObjectRef
    num_rows: int

    @classmethod
    def leave(cls, batch: DataProto) -> RemoteBatch:
        """Put a batch into this process's object store. It is lost when the process ends."""
        import ray

        return cls(ray.put(wrap(batch)), len(batch))

    def future(self) -> Future[Any]:
        """The batch, or the error that keeps it from arriving."""
        batch: Future[Any] = Future()

        def hand_on(parcel: Future[Any]) -> None:
            try:
                batch.set_result(unwrap(parcel.result()))
            except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
                batch.set_exception(error)

        self.ref.future().add_done_callback(hand_on)
        return batch
