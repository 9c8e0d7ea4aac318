"""The base class of all roles: one actor, one rank.

A worker looks to torch.distributed like a rank that torchrun started: the same environment variables are set, and the
rendezvous store is already up when the ranks come to it. A role may therefore call `init_process_group` as under any
other launcher.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
import traceback
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import cloudpickle

from roll.errors import UserError
from roll.protocol.remote_rows import RemoteRows
from roll.protocol.row_delivery import BROADCAST, RowDelivery
from roll.workers.dispatch import Dispatch
from roll.workers.failure import RankError
from roll.workers.method import register
from roll.workers.output import output_file, write_output_to
from roll.workers.remote_batch import Keep, RemoteBatch

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_AWAITING = ("_awaited", "wait")
"""Functions of this module that stand between `execute` and an `async def`."""

FETCH_TIMEOUT_S = 300.0
"""Seconds that a worker waits for the rows of a DataProtoFuture. They exist when the call is made."""


class Worker:
    """One rank of a role. Subclasses add methods with `@register`, which a `Role` calls on all ranks.

    Subclasses that take arguments accept them by keyword and pass the others on, before they call code of the user.

    Args:
        log_dir: folder of a file for the output of this process; None leaves the output as it is.
        delivery: how the driver sends rows to the ranks of this role, for the strategy that receives them.
    """

    def __init__(
        self,
        *,
        role: str,
        rank: int,
        world_size: int,
        log_dir: Path | None = None,
        delivery: RowDelivery = BROADCAST,
    ) -> None:
        if log_dir is not None:
            write_output_to(output_file(log_dir, role, rank))
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.delivery = delivery
        self._store: TCPStore | None = None
        self._loop: asyncio.Runner | None = None

    def execute(self, method: str, keep: Keep, *args: Any, **kwargs: Any) -> Any:
        """Run a registered method; if it is an `async def`, until it has ended.

        All calls of a worker share one event loop, so a client or a lock that one of them made serves the next. What a
        method leaves running there goes on during the next call that awaits.

        Args:
            keep: what becomes of its result: None is returned instead where nobody would read it, and a RemoteBatch
                where it stays here.

        The role's exceptions leave as `RankError`. A boundary between processes must let any of them through, and an
        exception itself may not survive pickling.
        """
        try:
            result = getattr(self, method)(
                *map(_arrived, args), **{name: _arrived(arg) for name, arg in kwargs.items()}
            )
            if inspect.isawaitable(result):
                result = self._awaited(result)
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                raise UserError(f"{method} returned a generator, of which nothing has run: return a list")
            return _kept(result, keep)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            raise RankError(_account(error), time.time()) from None

    def _awaited(self, result: Awaitable[Any]) -> Any:
        async def wait() -> Any:  # a Runner takes coroutines, and a method may return any other awaitable
            return await result

        if self._loop is None:
            self._loop = asyncio.Runner()
        return self._loop.run(wait())

    @register(Dispatch.ONE_TO_ALL)
    def alive(self) -> int:
        """The process id of this rank."""
        return os.getpid()

    @register(Dispatch.RANK_ZERO)
    def address(self) -> tuple[str, int] | None:
        """On rank 0, start the rendezvous store; its address and port.

        The store binds a port that the system chooses and keeps it, so no other process can take the port between the
        choice and the rendezvous.
        """
        if self.rank != 0:
            return None
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    @register(Dispatch.ONE_TO_ALL)
    def join(self, host: str, port: int) -> None:
        """Set the environment of this rank.

        Ray shows each actor only the device that it was given, so every rank is the local rank 0.
        """
        os.environ |= {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            # torch.distributed.rendezvous: the store exists, rank 0 is a client of it like all others.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def actor_class(worker_cls: type[Worker]) -> type:
    """The class of the actors that hold a worker each, under the worker's name, which Ray's logs and messages show.

    Ray makes an actor with any `async def` an asynchronous one: up to 1000 calls run at once, in any order, and an
    ordinary method would run inside the event loop. This class has none, so its calls come one at a time, in order.
    """
    return type(worker_cls.__name__, (WorkerActor,), {"pickled_worker_cls": cloudpickle.dumps(worker_cls)})


class WorkerActor:
    """A worker, and the two methods that the driver calls through Ray.

    Args:
        threads: number of threads that the worker computes with on a CPU. torch reads it from the environment when it
            is loaded, so the module of the worker class, which may load torch, is loaded after it is set.
    """

    pickled_worker_cls: bytes

    def __init__(self, *, threads: int, **settings: Any) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        worker_cls: type[Worker] = cloudpickle.loads(self.pickled_worker_cls)
        self._worker = worker_cls(**settings)

    def execute(self, method: str, keep: Keep, *args: Any, **kwargs: Any) -> Any:
        return self._worker.execute(method, keep, *args, **kwargs)

    def alive(self) -> int:
        return self._worker.alive()


def _arrived(value: Any) -> Any:
    """An argument as the method takes it; rows that are still remote are fetched."""
    return value.get(FETCH_TIMEOUT_S) if isinstance(value, RemoteRows) else value


def _kept(result: Any, keep: Keep) -> Any:
    if keep == "nothing":
        return None
    if keep == "result":
        return result
    assert keep == "reference", keep
    from roll.protocol import DataProto  # Here, since a role need not have batches, nor load torch for them.

    if not isinstance(result, DataProto):
        raise UserError(f"only a DataProto can stay with the worker, the method returned {type(result).__name__}")
    return RemoteBatch.leave(result)


def _account(error: BaseException) -> str:
    """The traceback of a role's exception, without the frames between `execute` and the method."""
    report = traceback.TracebackException.from_exception(error)
    between = ("asyncio/runners.py", "asyncio/base_events.py")
    frames = [
        frame
        for frame in report.stack[1:]
        if not frame.filename.endswith(between) and not (frame.filename == __file__ and frame.name in _AWAITING)
    ]
    report.stack = traceback.StackSummary.from_list(frames)
    return "".join(report.format())
