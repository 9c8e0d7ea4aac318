"""Workers for the tests, in a module that actors can import. It loads torch only where a method needs it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

import ray

from roll.protocol.row_delivery import RowDelivery
from roll.workers.dispatch import Dispatch
from roll.workers.method import register
from roll.workers.role import Role
from roll.workers.worker import Worker

if TYPE_CHECKING:
    from roll.protocol import DataProto

THREADS_AT_IMPORT = os.environ.get("OMP_NUM_THREADS")


class Probe(Worker):
    """Computes, waits in collectives, and fails in every way a role can fail."""

    def __init__(self, *, bad_rank: int = -1, **identity: Any) -> None:
        super().__init__(**identity)
        if self.rank == bad_rank:
            raise ValueError(f"rank {self.rank} cannot be made")

    @register(Dispatch.ONE_TO_ALL)
    def init_group(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> int:
        import torch

        total = torch.tensor(self.rank)
        torch.distributed.all_reduce(total)
        return int(total)

    @register(Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}

    @register(Dispatch.ONE_TO_ALL)
    def threads_at_import(self) -> str | None:
        """What torch would read, if this module loaded it."""
        return THREADS_AT_IMPORT

    @register(Dispatch.ONE_TO_ALL)
    def own_delivery(self) -> RowDelivery:
        return self.delivery

    @register(Dispatch.RANK_ZERO)
    def fail_on(self, rank: int, how: str) -> int:
        """`rank` fails; the others wait for it in an all_reduce."""
        if self.rank == rank:
            fail(how)
        return self.sum_of_ranks()

    @register(Dispatch.ONE_TO_ALL)
    def wait_on(self, rank: int) -> None:
        """`rank` is busy until its process is ended; the others have nothing to do."""
        if self.rank == rank:
            threading.Event().wait()

    @register(Dispatch.ONE_TO_ALL)
    def meet_without(self, rank: int) -> None:
        """The others wait for `rank` in an all_reduce; `rank` has nothing to do."""
        if self.rank != rank:
            self.sum_of_ranks()

    @register(Dispatch.DP_MP_DISPATCH_FIRST, returns_batch=True)
    def scaled(self, data: DataProto, scale: int) -> DataProto:
        """`scale` times the rows; every rank must be the leader of its group."""
        return type(data).from_dict({"y": data["x"] * scale})

    @register(Dispatch.DP_MP_DISPATCH_FIRST, uneven="pad", returns_batch=True)
    def negated(self, data: DataProto) -> DataProto:
        return type(data).from_dict(
            {"x": -data["x"], "more": data["x"]}, meta_info={"step": 3, "metrics": {"rank": [self.rank]}}
        )

    @register(Dispatch.DP_MP_COMPUTE)
    def rows(self, data: DataProto) -> list[int]:
        return data["x"].tolist()

    @register(Dispatch.DP_MP_COMPUTE, uneven="pad", fields=("x",), returns_batch=True)
    def squared(self, data: DataProto) -> DataProto:
        assert list(data.tensors) == ["x"] and len(data) == 2
        data["x"].square_()  # The rows are this rank's own, though the object store has them once.
        return type(data).from_dict({"y": data["x"]}, meta_info=data.meta_info)

    @register(Dispatch.DP_MP_DISPATCH_FIRST)
    def kinds(self, data: DataProto) -> list[str]:
        """Of every rank of the group: whether it got rows or a stub, which know the same of the batch."""
        import torch.distributed as dist

        assert data.meta_info["step"] == 3
        kinds = [""] * self.world_size
        dist.all_gather_object(kinds, "stub" if data.batch is None else "rows")
        return kinds

    @register(Dispatch.ALL_TO_ALL)
    def add(self, left: int, right: int) -> int:
        return left + right

    def not_registered(self) -> None:
        """Has no rule, so the driver may not call it."""


class Probes(Role, Probe):
    """All ranks."""


class Asking(Probe):
    """Has methods that await, beside ordinary ones."""

    def __init__(self, **identity: Any) -> None:
        super().__init__(**identity)
        self.log: list[str] = []
        self.lock: asyncio.Lock | None = None
        self.left_running: asyncio.Task[None] | None = None

    @register(Dispatch.ONE_TO_ALL)
    async def ask(self, name: str) -> list[str]:
        """Gives way to other calls, if there were any that ran, between its two entries."""
        self.log.append(f"{name} begins")
        await self._turns(20)
        self.log.append(f"{name} ends")
        return self.log

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0.001)

    @register(Dispatch.ONE_TO_ALL)
    def note(self, name: str) -> list[str]:
        """An ordinary method; that it may run an event loop of its own says that it is inside of none."""
        asyncio.run(self._turns(1))
        assert threading.current_thread() is threading.main_thread()
        self.log.append(name)
        return self.log

    @register(Dispatch.ONE_TO_ALL)
    async def use_a_lock(self) -> str:
        """A lock belongs to the event loop that it was first waited for in."""
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            waiting = asyncio.ensure_future(self.lock.acquire())
            await asyncio.sleep(0)
        await waiting
        self.lock.release()
        return "used"

    @register(Dispatch.ONE_TO_ALL)
    async def leave_running(self) -> None:
        async def note() -> None:
            await asyncio.sleep(0)
            self.log.append("left running")

        self.left_running = asyncio.create_task(note())

    @register(Dispatch.ONE_TO_ALL)
    def handed_on(self, name: str) -> Awaitable[list[str]]:
        """Not itself an `async def`."""
        return self.ask(name)

    @register(Dispatch.DP_MP_COMPUTE, returns_batch=True)
    async def doubled(self, data: DataProto) -> DataProto:
        await self._turns(1)
        return data.update({"x": 2 * data["x"]})

    @register(Dispatch.ONE_TO_ALL)
    async def fail_while_asking(self) -> None:
        await self._turns(1)
        raise HoldsLock("the server is away")

    @register(Dispatch.ONE_TO_ALL)
    async def await_the_cancelled(self) -> None:
        cancelled = asyncio.ensure_future(self._turns(1000))
        cancelled.cancel()
        await cancelled

    @register(Dispatch.ONE_TO_ALL)
    def expression(self) -> Iterator[int]:
        return (number for number in range(3))


class Askings(Role, Asking):
    """All ranks."""


class NeedsArguments(Exception):
    """Pickles, but cannot be unpickled: its constructor wants more than `args` holds."""

    def __init__(self, wanted: int, found: int) -> None:
        super().__init__(f"wanted {wanted}, found {found}")


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


def fail(how: str) -> None:
    """Fail in one of the ways below, or return to whom it does not concern."""
    if how == "needs arguments":
        raise NeedsArguments(3, 4)
    if how == "holds lock":
        raise HoldsLock("heads 3 do not divide by tp 2")
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "exit_actor":
        ray.actor.exit_actor()
    if how == "memory":
        bytearray(2**62)
    assert how == "sys.exit", how
    raise SystemExit(4)
