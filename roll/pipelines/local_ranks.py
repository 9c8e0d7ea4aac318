"""The ranks of a run as processes of this machine, for who has no launcher. torchrun does the same, and more.

Ctrl-C interrupts each rank once, so that it can close its files and its display; one that hangs in a collective is
killed after a while. So is every rank if one of them fails, or if this process is gone.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.multiprocessing as mp

from roll.config import ConfigError, Problem
from roll.errors import UserError, mistake

PATIENCE_S = 10.0
"""How long a rank may take to end after it was told to."""


def run_on_ranks(function: Callable[..., None], *arguments: Any, world_size: int) -> None:
    """Call `function(*arguments)` on every rank, and return when all have.

    Function and arguments are pickled. Ranks find each other by the environment, as under torchrun.

    Raises:
        ConfigError: a rank found a mistake of the user (`roll.errors.mistake`).
        torch.multiprocessing.ProcessRaisedException: a rank failed; with its traceback.
        KeyboardInterrupt: after every rank has ended.
    """
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))  # Read when a rank imports torch.
    mistakes = mp.get_context("spawn").SimpleQueue()
    context = mp.start_processes(
        _rank,
        (world_size, _free_port(), mistakes, function, arguments),
        nprocs=world_size,
        join=False,
        start_method="spawn",
    )
    try:
        while not context.join(grace_period=PATIENCE_S):
            pass
    except mp.ProcessExitedException:
        if mistakes.empty():
            raise
        raise ConfigError([Problem("", mistakes.get())]) from None
    except KeyboardInterrupt:
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        for process in context.processes:
            process.join(PATIENCE_S)
            process.kill()
            process.join()
        raise


def _rank(
    rank: int, world_size: int, port: int, mistakes: Any, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """What each process does. `mistakes` is a queue for the lines of one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt_once)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        function(*arguments)
    except (UserError, OSError) as error:
        lines = mistake(error)
        if lines is None:
            raise
        mistakes.put(lines)
        raise SystemExit(2) from None


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Ctrl-C reaches a rank from the terminal and from its parent: the second must not disturb the cleaning up."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    raise KeyboardInterrupt


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
