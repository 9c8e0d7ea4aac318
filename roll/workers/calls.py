"""Calls to the actors of a role: sending, waiting, and watching for failures.

    driver                         rank 0            rank 1
    call ── route ── put shares ──▶ execute ────────▶ execute
      │                                │  collectives  │
      └── wait ◀── result or RankError ┴───────────────┘ ── gather

While the driver waits on one call it watches all roles of the placement: every call in flight, and a heartbeat to
every actor, which shows the death of an actor that is not part of the call. The first failure ends the wait: after a
moment in which the failures of other ranks arrive, the role's actors are killed and the first cause is raised. Nothing
waits for a collective to time out.

The driver calls from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Generic, NoReturn, TypeVar, cast

import ray
from ray.exceptions import RayError

from roll.protocol.row_delivery import BROADCAST, RowDelivery
from roll.workers.actors import Actors
from roll.workers.dispatch import Dispatch, Rule
from roll.workers.errors import HEARTBEAT, CallTimedOut
from roll.workers.failure import Failure, failure_of, worker_failed
from roll.workers.remote_batch import Keep, RemoteBatch, check_held
from roll.workers.routing import check_can_stay, gather, reporting_ranks, route

HEARTBEAT_S = 2.0
"""Seconds between two questions whether an idle actor lives."""
GRACE_S = 1.0
"""Seconds for which failures of other ranks are gathered after the first, in case one of them is the cause."""
CAUSE_S = 4.0
"""The same while all known failures follow from a lost peer, so that the cause is still to come."""

T = TypeVar("T")


class PendingCall(Generic[T]):
    """A call that every rank of a role has been sent. `result` waits for it; made by `submit` of a role's method.

    Raises ValueError for a batch that does not divide or whose results cannot stay with the workers, and WorkerError
    where the rows of a DataProtoFuture among the arguments are gone: no rank has been called then.
    """

    def __init__(
        self,
        watch: Watch,
        method: str,
        rule: Rule,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        delivery: RowDelivery = BROADCAST,
        timeout_s: float = 0.0,
        leave: bool = False,
    ) -> None:
        self.watch, self.method, self._rule, self._timeout_s = watch, method, rule, timeout_s
        self.failures: list[Failure] = []
        self._answers: dict[int, Any] = {}
        kwargs, degrees = kwargs or {}, watch.actors.degrees
        self._reporters = reporting_ranks(rule, degrees)
        check_held([*args, *kwargs.values()])
        if leave:
            check_can_stay(method, rule, degrees, [*args, *kwargs.values()])
        routed, self._sent = route(rule, degrees, args, kwargs, _put, delivery)
        keep: Keep = "reference" if leave else "result"
        self.pending: dict[ray.ObjectRef, int] = {
            actor.execute.options(name=f"{watch.actors.role}.{method}").remote(
                method, keep if rank in self._reporters else "nothing", *routed[rank].args, **routed[rank].kwargs
            ): rank
            for rank, actor in enumerate(watch.actors.handles)
        }

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        refs = list(self.pending)
        return not refs or len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def result(self, timeout: float | None = None) -> T:
        """The value of the call, as its dispatch rule collects it.

        A wait that ends in any other way (a rank fails, `timeout` seconds pass, Ctrl-C) kills the role's actors, since
        they may sit in a collective for ever. Raises WorkerFailed, for this role or another one of the placement, or
        CallTimedOut. The default limit is the cluster's `call_timeout_s`.
        """
        finished = False
        try:
            self.watch.wait_for(self, self._timeout_s if timeout is None else timeout)
            finished = True
        finally:
            self.watch.forget(self)
            if not finished:
                self.watch.actors.kill()
        answers = [self._answers[rank] for rank in self._reporters]
        held = [answer.held_by(self.watch.actors) if isinstance(answer, RemoteBatch) else answer for answer in answers]
        return cast(T, gather(self._rule, held, self._sent))

    def take(self, ref: ray.ObjectRef) -> None:
        """Keep the answer of one rank, which has arrived."""
        rank = self.pending.pop(ref)
        try:
            self._answers[rank] = ray.get(ref)
        except RayError as error:
            self.failures.append(failure_of(error, self.watch.actors.role, rank, self.method))


class Watch:
    """The calls of one role that are in flight, and the heartbeat of its actors.

    `neighbours` are the watches of all roles of the placement; this one adds itself.
    """

    def __init__(self, actors: Actors, neighbours: list[Watch]) -> None:
        self.actors, self._neighbours = actors, neighbours
        self._in_flight: list[PendingCall[Any]] = []
        self._heartbeat: PendingCall[Any] | None = None
        self._last_beat = time.monotonic()
        neighbours.append(self)

    def add(self, call: PendingCall[Any]) -> None:
        """Watch a call until it is collected."""
        self._in_flight.append(call)

    def forget(self, call: PendingCall[Any]) -> None:
        """The call has been collected, or given up."""
        if call in self._in_flight:
            self._in_flight.remove(call)

    def calls(self) -> Iterator[PendingCall[Any]]:
        """The calls that have not been collected, the heartbeat among them."""
        yield from self._in_flight
        if self._heartbeat is not None:
            yield self._heartbeat

    def beat(self, pause: float = HEARTBEAT_S) -> None:
        """Ask every actor whether it lives, unless the last question is still open or less than `pause` seconds old."""
        if self._heartbeat is not None and (self._heartbeat.pending or self._heartbeat.failures):
            return
        if time.monotonic() - self._last_beat < pause:
            return
        self._last_beat = time.monotonic()
        self._heartbeat = PendingCall(self, HEARTBEAT, Rule(Dispatch.ONE_TO_ALL))

    def wait_for(self, call: PendingCall[Any], seconds: float) -> None:
        """Wait until every rank has answered. Raises as `PendingCall.result` does."""
        deadline = time.monotonic() + seconds
        while True:
            self.actors.raise_if_stopped()
            watches = [watch for watch in self._neighbours if not watch.actors.stopped]
            calls = [known for watch in watches for known in watch.calls()]
            if any(known.failures for known in calls):
                _raise_first_cause(watches)
            if not call.pending:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                missing = tuple(sorted(call.pending.values()))
                error = CallTimedOut(self.actors.role, call.method, seconds, missing, self.actors.degrees.world_size)
                self.actors.fail(error)
                raise error
            for watch in watches:
                watch.beat()
            _take_ready([known for watch in watches for known in watch.calls()], min(left, HEARTBEAT_S))


def _raise_first_cause(watches: list[Watch]) -> NoReturn:
    """Gather the failures of all ranks for a moment, stop the roles that have one, and raise the first cause."""
    for watch in watches:
        watch.beat(pause=0)  # an actor that had answered may have died and be the cause
    calls = [call for watch in watches for call in watch.calls()]
    begun = time.monotonic()
    while True:
        failures = [failure for call in calls for failure in call.failures]
        limit = CAUSE_S if all(failure.follows_from_a_peer for failure in failures) else GRACE_S
        left = begun + limit - time.monotonic()
        if left <= 0 or not any(call.pending for call in calls):
            break
        _take_ready(calls, left)
    failed = {call.watch.actors.role: call.watch.actors for call in calls if call.failures}
    waiting = {(call.watch.actors.role, rank) for call in calls for rank in call.pending.values()}
    waiting -= {(failure.role, failure.rank) for failure in failures}
    error = worker_failed(failures, [f"{role} rank {rank}" for role, rank in sorted(waiting) if role in failed])
    for actors in failed.values():
        actors.fail(error)
    raise error


def _put(value: Any) -> Any:
    """Place a value into the object store once, unless it is small or already there."""
    small = (type(None), bool, int, float, str, PurePath, ray.ObjectRef)
    return value if isinstance(value, small) else ray.put(value)


def _take_ready(calls: list[PendingCall[Any]], timeout: float) -> None:
    """Wait until a rank of one of the calls answers, for at most `timeout` seconds, and take all answers there are."""
    owner = {ref: call for call in calls for ref in call.pending}
    if not owner:
        return
    refs = list(owner)
    ready, _ = ray.wait(refs, num_returns=1, timeout=timeout)
    if ready:
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
    for ref in ready:
        owner[ref].take(ref)
