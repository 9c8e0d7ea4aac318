"""Processes that a test has started: waiting for what they do, and for their end.

Other processes of the machine come and go at any time, between a listing and the next question too. So each function
takes the processes that it is about, and one that is gone is no error.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

PATIENCE_S = 1200.0
"""How long anything is waited for: far longer than it takes on a busy machine, so that only a hang exceeds it."""


def wait_until(
    happened: Callable[[], bool], process: subprocess.Popen[str] | None = None, log: Path | None = None
) -> None:
    """Wait for something that has no handle to wait on, such as a line in a file.

    Raises AssertionError if it has not happened after PATIENCE_S, or `process`, which is to bring it about, has ended:
    with what is in `log`, or in the pipes of `process`.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if process is not None and process.poll() is not None:
            said = log.read_text() if log else "".join(filter(None, process.communicate()))
            raise AssertionError(f"exit status {process.returncode}\n{said}")
        assert time.monotonic() < deadline, f"did not happen within {PATIENCE_S:g} s"
        time.sleep(0.05)


def processes_of(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes with these ids, which run. Unlike the ids, they are never taken for later processes."""
    return [psutil.Process(pid) for pid in pids]


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that a process has started, and theirs; none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command_line(process: psutil.Process) -> list[str]:
    """How a process was started; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # ZombieProcess is one.
        return []


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more; its parent may not have asked for its exit status yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(processes: Sequence[psutil.Process]) -> None:
    """Wait until all have ended."""
    wait_until(lambda: all(map(has_ended, processes)))


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that still run."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end(process: subprocess.Popen[str], patience_s: float = 30.0) -> None:
    """Interrupt a process that still runs, and kill it and all that it started if that does not end it."""
    if process.poll() is not None:
        return
    family = [*processes_of([process.pid]), *descendants(process.pid)]
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=patience_s)
    kill(alive)
    psutil.wait_procs(alive, timeout=PATIENCE_S)
