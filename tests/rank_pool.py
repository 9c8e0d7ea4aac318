"""A pool of processes that tests use as the ranks of a process group.

Starting a Python process that imports torch takes seconds, creating a gloo group takes milliseconds. So all processes
but one are forks of one that has imported it (`tests/rank_imports.py`), they live as long as the pool, and every job
gets a process group of its own:

    pool = RankPool(size=4)
    results = pool.run(all_reduce_of_rank, 3.0, world_size=2)    # one result per rank

A job's function is pickled by reference, so it stands at module level. Its arguments and results are pickled to
bytes on both sides: tensors arrive as copies and no file descriptor or shared memory outlives a job.

Nothing hangs: when one rank fails, the others (perhaps waiting for it in a collective) are killed and replaced before
the next job; when a job exceeds its timeout, the stacks of its ranks are part of the error.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

PRELOADED = "tests.rank_imports"
# Far longer than a job takes on a busy machine: they show that something hangs. Collectives give up first, since their
# error says more.
GROUP_TIMEOUT = timedelta(seconds=300)
JOB_TIMEOUT_S = 400.0
# What gloo says on the peers of a rank that failed. While only such echoes have arrived, the cause is still awaited.
ECHO = re.compile(r"gloo/transport.*(closed|reset) by peer", re.IGNORECASE)
CAUSE_WAIT_S = 60.0
# The first of several failures within this time is reported.
ORDER_WAIT_S = 0.2
START_TIMEOUT_S = 600.0
# How long a process may take to write its stacks. One that computes answers at once.
STACKS_WAIT_S = 20.0
# Sent when every rank has answered: a rank that left the group earlier would break the connections of slower ones.
RELEASE = "release"


class RankError(RuntimeError):
    """A job failed: `rank` is the first rank that failed, `traceback` its own traceback or the stacks found."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(f"rank {rank} failed:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class _Rank:
    """The parent's side of one process: the process, the pipe to it and the file its stacks are dumped to."""

    def __init__(self, folder: Path, number: int, method: Literal["spawn", "forkserver"]) -> None:
        context = multiprocessing.get_context(method)
        if isinstance(context, ForkServerContext):
            context.set_forkserver_preload([PRELOADED])
        self._preloaded = method == "forkserver"
        self.started = False
        self.stacks = folder / f"stacks-{number}.txt"
        self.connection, child = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(child, str(self.stacks)), daemon=True)
        self.process.start()
        child.close()

    def await_start(self) -> None:
        """Wait until the process has its modules, so that importing them does not count towards a job's time."""
        if self.started:
            return
        if not self.connection.poll(START_TIMEOUT_S):
            raise RuntimeError(f"a process of the pool did not start within {START_TIMEOUT_S:g} s")
        imported = self.connection.recv()
        assert imported or not self._preloaded, f"{PRELOADED} could not be imported"
        self.started = True

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def dump_stacks(self) -> str:
        """The Python stacks of all threads of a process that is still running."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACKS_WAIT_S
        text = ""
        while time.monotonic() < deadline:
            seen, text = text, self.stacks.read_text() if self.stacks.exists() else ""
            if text and text == seen:  # no longer growing
                break
            time.sleep(0.05)
        return text or "(no stacks: the process did not answer)\n"


class RankPool:
    """`size` processes that run module-level functions as ranks of gloo groups of up to `size` ranks."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._started = 0
        self._jobs = 0
        self._ranks: list[_Rank | None] = [None] * size

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = JOB_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank of a new default process group; the results in rank order.

        Raises RankError when a rank raises, exits or the job takes longer than `timeout` seconds, and ValueError when
        the pool has fewer processes than `world_size`.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size={world_size} does not fit the pool of {self.size} processes")
        job = pickle.dumps((fn, args, kwargs))
        ranks = [self._rank(i) for i in range(world_size)]
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store-{self._jobs}")
        try:
            for rank in ranks:
                rank.await_start()
            for i, rank in enumerate(ranks):
                rank.connection.send((i, world_size, store, job))
            results = self._collect(ranks, timeout)
            for rank in ranks:
                rank.connection.send(RELEASE)
            return results
        except BaseException:  # also Ctrl-C: ranks that did not finish are of no further use
            for i in range(world_size):
                self._drop(i)
            raise

    def close(self) -> None:
        """Stop all processes."""
        for i in range(self.size):
            self._drop(i)
        self._folder.cleanup()

    def _rank(self, i: int) -> _Rank:
        rank = self._ranks[i]
        if rank is None or not rank.process.is_alive():
            self._drop(i)
            # Forks of one process have one seed of hashes, and with it one order of sets. Rank 1 has another, as
            # processes of their own have: what depends on it differs between ranks, and is found.
            method: Literal["spawn", "forkserver"] = "spawn" if i == 1 else "forkserver"
            rank = self._ranks[i] = _Rank(Path(self._folder.name), self._started, method)
            self._started += 1
        return rank

    def _drop(self, i: int) -> None:
        rank, self._ranks[i] = self._ranks[i], None
        if rank is not None:
            rank.kill()

    @staticmethod
    def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[tuple[bool, float, int, str]] = []  # the smallest is the one to report
        waiting = {rank.connection: i for i, rank in enumerate(ranks)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                stacks = "".join(f"--- rank {i}\n{ranks[i].dump_stacks()}" for i in sorted(waiting.values()))
                raise RankError(min(waiting.values()), f"no result after {timeout:g} s; stacks of its ranks:\n{stacks}")
            for connection in ready:
                assert isinstance(connection, Connection)
                i = waiting.pop(connection)
                succeeded, when, payload = _receive(connection, ranks[i].process)
                if succeeded:
                    results[i] = pickle.loads(payload)
                else:
                    failures.append((ECHO.search(payload) is not None, when, i, payload))
            if failures:
                only_echoes = min(failures)[0]
                deadline = min(deadline, time.monotonic() + (CAUSE_WAIT_S if only_echoes else ORDER_WAIT_S))
        if failures:
            _, _, i, text = min(failures)
            raise RankError(i, text)
        return [results[i] for i in range(len(ranks))]


def _receive(connection: Connection, process: BaseProcess) -> tuple[bool, float, Any]:
    """One rank's answer: (succeeded, time of the end, pickled result or traceback)."""
    try:
        answer: tuple[bool, float, Any] = connection.recv()
    except EOFError:
        process.join()
        return False, time.time(), f"the process ended without a result, exit code {process.exitcode}"
    return answer


def _serve(connection: Connection, stacks: str) -> None:
    """The loop of one process: take a job, run it as a rank, answer; until the parent closes the pipe."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # To the parent these processes are daemons, which it ends with itself; as for themselves, they may have children
    # (the writers of a checkpoint).
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    imported = 0
    connection.send(PRELOADED in sys.modules)
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
        while True:
            try:
                rank, world_size, store, job = connection.recv()
                connection.send(_run_as_rank(rank, world_size, store, job))
                connection.recv()  # RELEASE
            except EOFError:  # The pool has gone. Without the interpreter's own end, which may wait for gloo's threads.
                os._exit(0)
            if dist.is_initialized():
                dist.destroy_process_group()
            # Models refer to their groups in cycles, and each gloo group has threads and sockets: after a few dozen
            # jobs the threads of groups that nobody uses any more would take most of the time.
            if grown := len(sys.modules) > imported:
                imported = len(sys.modules)
                gc.unfreeze()
            gc.collect()
            if grown:  # Objects of modules stay. Skipping them saves 0.4 s for each job.
                gc.freeze()


def _end_with_the_parent() -> None:
    """Without this, a rank that waits for a peer in a collective would outlive a test run that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_as_rank(rank: int, world_size: int, store: str, job: bytes) -> tuple[bool, float, bytes | str]:
    """(True, time, pickled result) or (False, time of the failure, traceback)."""
    import torch.distributed as dist

    try:
        fn, args, kwargs = pickle.loads(job)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        dist.barrier()  # connections are made by now, whatever the job does first
        return True, time.time(), pickle.dumps(fn(*args, **kwargs))
    except BaseException:  # noqa: BLE001 - whatever it is, also SystemExit, the test must see it
        return False, time.time(), traceback.format_exc()
