"""Errors of calls on roles, as the driver's user sees them. Loads no Ray, so that commands may name them."""

from __future__ import annotations

HEARTBEAT = "alive"
"""The method that asks an actor whether it lives."""


class WorkerError(RuntimeError):
    """A call on a cluster did not end well; the cluster's actors have been stopped."""


class WorkerFailed(WorkerError):
    """A rank raised, or its process died.

    `role` and `rank` say which, `traceback` is that rank's own account: its Python traceback, or what Ray knows of the
    death of its process.
    """

    def __init__(self, role: str, rank: int, traceback: str, method: str, others: str = "") -> None:
        super().__init__(role, rank, traceback, method, others)
        self.role, self.rank, self.traceback, self.method, self.others = role, rank, traceback, method, others

    def __str__(self) -> str:
        where = "between calls" if self.method == HEARTBEAT else f"in {self.method}"
        text = f"{self.role} rank {self.rank} failed {where}\n\n{self.traceback.rstrip()}"
        return f"{text}\n\n{self.others}" if self.others else text


class CallTimedOut(WorkerError):
    """A call took longer than its limit; `missing` are the ranks that had not answered."""

    def __init__(self, role: str, method: str, seconds: float, missing: tuple[int, ...], world_size: int) -> None:
        super().__init__(role, method, seconds, missing, world_size)
        self.role, self.method, self.seconds, self.missing, self.world_size = role, method, seconds, missing, world_size

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.missing))
        return (
            f"{self.role}: {self.method} did not end within {self.seconds:g} s; "
            f"no answer from rank {ranks} (of {self.world_size})"
        )
