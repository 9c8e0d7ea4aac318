"""The ranks of one role as Ray actors, and how the driver calls them.

    driver                         rank 0            rank 1
    call ── route ── put shares ──▶ execute ────────▶ execute
      │                                │  collectives  │
      └── wait ◀── result or RankError ┴───────────────┘ ── gather

While the driver waits on one call it watches all clusters of the placement: every call in flight, and a heartbeat to
every actor, which shows the death of an actor that is not part of the call. The first failure ends the wait: after a
moment in which the failures of other ranks arrive, the cluster's actors are killed and the first cause is raised.
Nothing waits for a collective to time out.

The driver uses a cluster from one thread.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from roll.config import RowsOn
from roll.errors import UserError
from roll.parallel.degrees import ParallelDegrees
from roll.workers.dispatch import rule_of
from roll.workers.failure import HEARTBEAT, CallTimedOut, Failure, WorkerError, failure_of, worker_failed
from roll.workers.placement import Placement
from roll.workers.remote_batch import RemoteBatch, check_held
from roll.workers.routing import check_can_stay, check_rows_on, gather, reporting_ranks, route
from roll.workers.worker import Keep, Worker, actor_class

HEARTBEAT_S = 2.0
"""Seconds between two questions whether an idle actor lives."""
GRACE_S = 1.0
"""Seconds for which failures of other ranks are gathered after the first, in case one of them is the cause."""
CAUSE_S = 4.0
"""The same while all known failures follow from a lost peer, so that the cause is still to come."""
STOP_S = 10.0
"""Seconds that `shutdown` waits for Ray to confirm that the actors are gone."""


class PendingCall:
    """A call that every rank of a cluster has been sent. `result` waits for it; made by `Cluster.submit`."""

    def __init__(
        self, cluster: Cluster, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, leave: bool = False
    ) -> None:
        self.cluster = cluster
        self.method = method
        self.failures: list[Failure] = []
        self._rule = rule_of(cluster.worker_cls, method)
        # A call that does not fit the signature is refused here, with Python's own message.
        inspect.signature(getattr(cluster.worker_cls, method)).bind(None, *args, **kwargs)
        self._reporters = reporting_ranks(self._rule, cluster.degrees)
        self._answers: dict[int, Any] = {}
        check_held([*args, *kwargs.values()])
        if leave:
            check_can_stay(method, self._rule, cluster.degrees, [*args, *kwargs.values()])
        routed, self._sent = route(self._rule, cluster.degrees, args, kwargs, _put, cluster.rows_on)
        keep: Keep = "reference" if leave else "result"
        self.pending: dict[ray.ObjectRef, int] = {
            actor.execute.options(name=f"{cluster.role}.{method}").remote(
                method, keep if rank in self._reporters else "nothing", *routed[rank].args, **routed[rank].kwargs
            ): rank
            for rank, actor in enumerate(cluster.actors)
        }

    def done(self) -> bool:
        """Whether every rank has answered or failed. Does not wait."""
        refs = list(self.pending)
        return not refs or len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def result(self, timeout: float | None = None) -> Any:
        """The value of the call, as its dispatch rule collects it.

        A wait that ends in any other way (a rank fails, `timeout` seconds pass, Ctrl-C) kills the cluster's actors,
        since they may sit in a collective for ever. Raises WorkerFailed, for this cluster or another one of the
        placement, or CallTimedOut. The default limit is the cluster's `call_timeout_s`.
        """
        seconds = self.cluster.call_timeout_s if timeout is None else timeout
        finished = False
        try:
            self._wait(seconds)
            finished = True
        finally:
            self.cluster.forget(self)
            if not finished:
                self.cluster.kill()
        answers = [self._answers[rank] for rank in self._reporters]
        held = [answer.held_by(self.cluster) if isinstance(answer, RemoteBatch) else answer for answer in answers]
        return gather(self._rule, held, self._sent)

    def take(self, ref: ray.ObjectRef) -> None:
        """Keep the answer of one rank, which has arrived."""
        rank = self.pending.pop(ref)
        try:
            self._answers[rank] = ray.get(ref)
        except RayError as error:
            self.failures.append(failure_of(error, self.cluster.role, rank, self.method))

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.cluster.raise_if_stopped()
            clusters = [cluster for cluster in self.cluster.placement.clusters if not cluster.stopped]
            if any(call.failures for cluster in clusters for call in cluster.calls()):
                _raise_first_cause(clusters)
            if not self.pending:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                missing = tuple(sorted(self.pending.values()))
                world_size = self.cluster.degrees.world_size
                error = CallTimedOut(self.cluster.role, self.method, seconds, missing, world_size)
                self.cluster.fail(error)
                raise error
            for cluster in clusters:
                cluster.beat()
            _take_ready([call for cluster in clusters for call in cluster.calls()], min(left, HEARTBEAT_S))


class Cluster:
    """The actors of one role. A context manager; `placement` also stops it.

    The constructor starts all actors and does not wait for them, so that the clusters of a run start side by side;
    `ready`, or the first call, waits. `worker_kwargs` go to the constructor of every worker, beside `role`, `rank`,
    `world_size` and `log_dir`. Workers write what they print into files in `log_dir`; None leaves it to Ray. `threads`
    is the number of threads a worker computes with on a CPU. `rows_on` says which ranks get the rows under
    DP_MP_DISPATCH_FIRST (see `route`); the strategies of the workers must be set alike.

    Raises ValueError if the layout of the placement does not have this role with this number of ranks, or `rows_on` is
    unknown; TypeError for `worker_kwargs` that the constructor does not take.
    """

    def __init__(
        self,
        worker_cls: type[Worker],
        *,
        role: str,
        degrees: ParallelDegrees,
        placement: Placement,
        worker_kwargs: Mapping[str, Any] | None = None,
        call_timeout_s: float = 1800.0,
        start_timeout_s: float = 300.0,
        threads: int = 1,
        rows_on: RowsOn = "leader",
        log_dir: Path | None = None,
    ) -> None:
        check_rows_on(rows_on)
        placed = placement.layout.roles.get(role)
        if placed != degrees.world_size:
            raise UserError(f"{role} has {degrees.world_size} ranks, the placement has {placed or 'none'} for it")
        identity = {"role": role, "world_size": degrees.world_size}
        inspect.signature(worker_cls).bind(rank=0, **identity, **(worker_kwargs or {}))
        self.worker_cls, self.role, self.degrees, self.placement = worker_cls, role, degrees, placement
        self.call_timeout_s, self.start_timeout_s, self.threads = call_timeout_s, start_timeout_s, threads
        self.rows_on: RowsOn = rows_on
        self.actors: list[Any] = []  # handles, on which Ray makes the methods of the class
        self._in_flight: list[PendingCall] = []
        self._heartbeat: PendingCall | None = None
        self._last_beat = time.monotonic()
        self._failure: WorkerError | None = None
        self._killed = self._gone = False
        placement.clusters.append(self)
        actor_cls: Any = ray.remote(actor_class(worker_cls))
        identity = {"role": role, "world_size": degrees.world_size, "log_dir": log_dir}
        for rank in range(degrees.world_size):
            placed_cls = actor_cls.options(**placement.actor_options(role, rank))
            self.actors.append(placed_cls.remote(rank=rank, **identity, **(worker_kwargs or {})))
        self._address: PendingCall | None = self._send("address")

    def ready(self) -> None:
        """Wait until every worker is made and knows its rendezvous. Raises WorkerFailed if one cannot be made."""
        if self._address is not None:
            address, self._address = self._address, None
            host, port = address.result(self.start_timeout_s)
            self._send("join", host, port, self.threads).result(self.start_timeout_s)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method on every rank and wait for its value (see `submit` and `PendingCall.result`)."""
        with self._stopped_by_ctrl_c():
            return self.submit(method, *args, **kwargs).result()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Send a registered method to every rank; a handle whose `result()` waits for it.

        Raises ValueError for a method that is not registered or a batch that does not divide, TypeError for arguments
        that do not fit the method's signature, WorkerError if the cluster has been stopped, or one whose workers hold
        the rows of a DataProtoFuture among the arguments: no rank has been called then, and this cluster goes on.
        """
        self.raise_if_stopped()
        self.ready()
        return self._send(method, *args, **kwargs)

    def submit_remote(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """The same, and the rows of the result stay with the workers: `result()` is a `DataProtoFuture` of them.

        They are there as long as these workers live. Handed to a method that splits its batch, the future is cut
        without being fetched: each rank fetches the rows of its own share.

        Raises ValueError as well for a method that is not registered with `returns_batch`, and for a batch with a
        micro-batch plan or of uneven shares, whose results would have to be brought back to their order here.
        """
        self.raise_if_stopped()
        self.ready()
        return self._send_call(method, args, kwargs, leave=True)

    def shutdown(self) -> None:
        """Kill the actors and wait until Ray confirms that they are gone. Calling it again does nothing."""
        self.kill()
        if self._gone:
            return
        self._gone = True
        # A call to an actor that is gone fails; it is the one answer that says so on any node.
        farewells: list[ray.ObjectRef] = [actor.alive.remote() for actor in self.actors]
        if farewells:
            ray.wait(farewells, num_returns=len(farewells), timeout=STOP_S)
        if self in self.placement.clusters:
            self.placement.clusters.remove(self)

    def kill(self) -> None:
        """Kill the actors without waiting. Calls in flight fail; later ones are refused."""
        if not self._killed:
            self._killed = True
            for actor in self.actors:
                ray.kill(actor)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _send(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        return self._send_call(method, args, kwargs)

    def _send_call(
        self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, leave: bool = False
    ) -> PendingCall:
        with self._stopped_by_ctrl_c():
            call = PendingCall(self, method, args, kwargs, leave=leave)
            self._in_flight.append(call)
            return call

    @contextmanager
    def _stopped_by_ctrl_c(self) -> Iterator[None]:
        """Kill the actors if Ctrl-C comes inside: ranks that were called would wait for those that were not."""
        try:
            yield
        except KeyboardInterrupt:
            self.kill()
            raise

    # What a waiting call needs of its own cluster and of the others.

    def calls(self) -> Iterator[PendingCall]:
        """The calls that have not been collected, the heartbeat among them."""
        yield from self._in_flight
        if self._heartbeat is not None:
            yield self._heartbeat

    def forget(self, call: PendingCall) -> None:
        """The call has been collected, or given up."""
        if call in self._in_flight:
            self._in_flight.remove(call)

    def beat(self, pause: float = HEARTBEAT_S) -> None:
        """Ask every actor whether it lives, unless the last question is still open or less than `pause` seconds old."""
        if self._heartbeat is not None and (self._heartbeat.pending or self._heartbeat.failures):
            return
        if time.monotonic() - self._last_beat < pause:
            return
        self._last_beat = time.monotonic()
        self._heartbeat = PendingCall(self, HEARTBEAT, (), {})

    @property
    def stopped(self) -> bool:
        """Whether the actors have been killed, so that their failures tell nothing."""
        return self._killed

    def fail(self, error: WorkerError) -> None:
        """Kill the actors; every later use of the cluster raises the error."""
        self._failure = error
        self.kill()

    def raise_if_stopped(self) -> None:
        """Raise what ended this cluster, if it was stopped."""
        if self._failure is not None:
            raise self._failure
        if self._killed:
            raise WorkerError(f"the {self.role} cluster was stopped")


def _raise_first_cause(clusters: list[Cluster]) -> NoReturn:
    """Gather the failures of all ranks for a moment, stop the clusters that have one, and raise the first cause."""
    for cluster in clusters:
        cluster.beat(pause=0)  # an actor that had answered may have died and be the cause
    calls = [call for cluster in clusters for call in cluster.calls()]
    begun = time.monotonic()
    while True:
        failures = [failure for call in calls for failure in call.failures]
        limit = CAUSE_S if all(failure.follows_from_a_peer for failure in failures) else GRACE_S
        left = begun + limit - time.monotonic()
        if left <= 0 or not any(call.pending for call in calls):
            break
        _take_ready(calls, left)
    failed = {call.cluster.role: call.cluster for call in calls if call.failures}
    waiting = {(call.cluster.role, rank) for call in calls for rank in call.pending.values()}
    waiting -= {(failure.role, failure.rank) for failure in failures}
    error = worker_failed(failures, [f"{role} rank {rank}" for role, rank in sorted(waiting) if role in failed])
    for cluster in failed.values():
        cluster.fail(error)
    raise error


def _put(value: Any) -> Any:
    """Place a value into the object store once, unless it is small or already there."""
    small = (type(None), bool, int, float, str, PurePath, ray.ObjectRef)
    return value if isinstance(value, small) else ray.put(value)


def _take_ready(calls: list[PendingCall], timeout: float) -> None:
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
