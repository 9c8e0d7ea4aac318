"""A result that stays with the worker that made it, until someone fetches its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ray

    from roll.protocol import DataProto


@dataclass(frozen=True)
class RemoteBatch:
    """Where a batch is, and how many rows it has: what the driver is told instead of the rows."""

    ref: ray.ObjectRef
    num_rows: int

    @classmethod
    def leave(cls, batch: DataProto) -> RemoteBatch:
        """Put a batch into this process's object store. It is lost when the process ends."""
        import ray

        return cls(ray.put(batch), len(batch))
