"""Failures of ranks as the driver is told them, and the choice of the one that caused the others.

When a rank fails, its peers often fail too, as a consequence: their collective loses a connection. What helps the user
is the cause, so failures are gathered for a moment and ranked (`first_cause`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from roll.workers.errors import WorkerFailed

# What a rank says whose *peer* is gone: gloo's transport, the exceptions of NCCL, of torch's network and store, and Ray
# about an object whose owner is gone. A refused connection alone may as well be a reward function's own.
_PEER_LOST = re.compile(
    r"gloo/transport|Dist(Backend|Network|Store)Error|NCCL (error|communicator)|remote process exited|"
    r"OwnerDiedError|ObjectLostError"
)


class RankError(Exception):
    """Exception that a worker raises in place of its role's: only text and time, which always survive the way."""

    def __init__(self, traceback: str, when: float) -> None:
        super().__init__(traceback, when)
        self.traceback, self.when = traceback, when

    def __str__(self) -> str:
        return self.traceback


@dataclass(frozen=True)
class Failure:
    """One rank's failure as the driver sees it. `when` is in seconds since the epoch, by the clock of its node."""

    role: str
    rank: int
    method: str
    text: str
    when: float
    died: bool

    @property
    def follows_from_a_peer(self) -> bool:
        """Whether this is most likely the consequence of another rank's failure."""
        return not self.died and _PEER_LOST.search(self.text) is not None

    @property
    def summary(self) -> str:
        """The last line of the account: for an exception, its type and message."""
        return "its process died" if self.died else self.text.rstrip().splitlines()[-1]


def failure_of(error: RayError, role: str, rank: int, method: str) -> Failure:
    """Turn what Ray reports for a call into a `Failure`."""
    died = (RayActorError, OutOfMemoryError)  # the latter when Ray itself killed the actor, before the node was full
    if isinstance(error, died) and not isinstance(error, ActorUnavailableError):
        return Failure(role, rank, method, _plain(error), time.time(), died=True)
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, RankError):
        return Failure(role, rank, method, cause.traceback, cause.when, died=False)
    # Raised outside the method itself: arguments or a result that could not be (de)serialised, a cancelled task.
    return Failure(role, rank, method, _plain(error), time.time(), died=False)


def _plain(error: RayError) -> str:
    """Ray's message without its terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that most likely caused the others: a death or an error of its own before a lost peer.

    A death comes before errors, since the time it is known to the driver is later than the errors that follow from it.
    """
    return min(failures, key=lambda failure: (failure.follows_from_a_peer, not failure.died, failure.when))


def worker_failed(failures: Sequence[Failure], missing: Sequence[str]) -> WorkerFailed:
    """The exception for the driver: the first cause in full, and one line for every other rank that failed.

    `missing` names ranks of the failed clusters that have not answered.
    """
    cause = first_cause(failures)
    known = {(cause.role, cause.rank)}
    others = []
    for failure in failures:
        if (failure.role, failure.rank) not in known:
            known.add((failure.role, failure.rank))
            others.append(f"{failure.role} rank {failure.rank}: {failure.summary}")
    if missing:
        others.append(f"no answer yet from {', '.join(missing)}")
    return WorkerFailed(cause.role, cause.rank, cause.text, cause.method, "\n".join(others))
