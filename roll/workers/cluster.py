"""The ranks of one role: started in a placement, then called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray

from roll.errors import UserError
from roll.parallel.degrees import ParallelDegrees
from roll.protocol.row_delivery import BROADCAST, RowDelivery
from roll.workers.actors import Actors
from roll.workers.calls import PendingCall, Watch
from roll.workers.method import RoleMethod, Sender
from roll.workers.placement import Placement
from roll.workers.worker import Worker, actor_class

T = TypeVar("T")


class Cluster(Sender):
    """The actors of one role. `Role` makes it and calls its methods; the placement stops it.

    The constructor starts all actors and does not wait for them, so that the roles of a run start side by side;
    `ready`, or the first call, waits.

    Args:
        worker_kwargs: go to the constructor of every worker, beside `role`, `rank`, `world_size`, `log_dir` and
            `delivery`.
        call_timeout_s: how long a call may take.
        threads: number of threads that a worker computes with on a CPU.
        delivery: how rows reach the ranks of a data-parallel share. Workers give the same object to their strategy.
        log_dir: folder of the files that workers write their output to; None leaves it to Ray.

    Raises ValueError if the layout of the placement does not have this role with this number of ranks; TypeError for
    `worker_kwargs` that the constructor does not take.
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
        delivery: RowDelivery = BROADCAST,
        log_dir: Path | None = None,
    ) -> None:
        placed = placement.layout.roles.get(role)
        if placed != degrees.world_size:
            raise UserError(f"{role} has {degrees.world_size} ranks, the placement has {placed or 'none'} for it")
        settings = {"role": role, "world_size": degrees.world_size, "log_dir": log_dir, "delivery": delivery}
        settings |= worker_kwargs or {}
        inspect.signature(worker_cls).bind(rank=0, **settings)
        self.role, self.degrees, self.placement, self.delivery = role, degrees, placement, delivery
        self.call_timeout_s, self.start_timeout_s = call_timeout_s, start_timeout_s
        self.actors = Actors(role, degrees)
        self._watch = Watch(self.actors, placement.watches)
        actor_cls: Any = ray.remote(actor_class(worker_cls))
        for rank in range(degrees.world_size):
            placed_cls = actor_cls.options(**placement.actor_options(role, rank))
            self.actors.handles.append(placed_cls.remote(rank=rank, threads=threads, **settings))
        self._address: PendingCall[tuple[str, int] | None] | None = self._send(Worker.address, (), {})

    def ready(self) -> None:
        """Wait until every worker is made and knows its rendezvous. Raises WorkerFailed if one cannot be made."""
        if self._address is not None:
            pending, self._address = self._address, None
            address = pending.result(self.start_timeout_s)
            assert address is not None, "rank 0 has the store"
            self._send(Worker.join, address, {}).result(self.start_timeout_s)

    def send(
        self,
        method: RoleMethod[..., Any, T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        leave: bool = False,
    ) -> PendingCall[T]:
        self.actors.raise_if_stopped()
        self.ready()
        return self._send(method, args, kwargs or {}, leave)

    def _send(
        self, method: RoleMethod[..., Any, T], args: tuple[Any, ...], kwargs: Mapping[str, Any], leave: bool = False
    ) -> PendingCall[T]:
        method.check_arguments(args, kwargs)
        with self.stopped_by_ctrl_c():
            call: PendingCall[T] = PendingCall(
                self._watch,
                method.name,
                method.rule,
                args,
                kwargs,
                delivery=self.delivery,
                timeout_s=self.call_timeout_s,
                leave=leave,
            )
            self._watch.add(call)
            return call

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.actors.kill()
            raise

    def shutdown(self) -> None:
        """Kill the actors and wait until Ray confirms that they are gone. Calling it again does nothing."""
        self.actors.shutdown()
        if self._watch in self.placement.watches:
            self.placement.watches.remove(self._watch)
