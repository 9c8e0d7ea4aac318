"""The Ray actors of one role, and whether they may still be called."""

from __future__ import annotations

from typing import Any

import ray

from roll.parallel.degrees import ParallelDegrees
from roll.workers.errors import WorkerError

STOP_S = 10.0
"""Seconds that `shutdown` waits for Ray to confirm that the actors are gone."""


class Actors:
    """The actors of all ranks of a role, in rank order, to which whoever makes them adds `handles`."""

    def __init__(self, role: str, degrees: ParallelDegrees) -> None:
        self.role, self.degrees = role, degrees
        self.handles: list[Any] = []  # Ray makes the methods of a handle from those of its class.
        self._failure: WorkerError | None = None
        self._killed = self._gone = False

    @property
    def stopped(self) -> bool:
        """Whether the actors have been killed, so that their failures tell nothing."""
        return self._killed

    def raise_if_stopped(self) -> None:
        """Raise what ended these actors, if they were stopped."""
        if self._failure is not None:
            raise self._failure
        if self._killed:
            raise WorkerError(f"the {self.role} cluster was stopped")

    def fail(self, error: WorkerError) -> None:
        """Kill the actors; every later use of them raises the error."""
        self._failure = error
        self.kill()

    def kill(self) -> None:
        """Kill the actors without waiting. Calls in flight fail; later ones are refused."""
        if not self._killed:
            self._killed = True
            for handle in self.handles:
                ray.kill(handle)

    def shutdown(self) -> None:
        """Kill the actors and wait until Ray confirms that they are gone. Calling it again does nothing."""
        self.kill()
        if self._gone:
            return
        self._gone = True
        # A call to an actor that is gone fails; it is the one answer that says so on any node.
        farewells: list[ray.ObjectRef] = [handle.alive.remote() for handle in self.handles]
        if farewells:
            ray.wait(farewells, num_returns=len(farewells), timeout=STOP_S)
