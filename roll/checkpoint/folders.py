"""Folders that appear only when they are complete, and that one rank makes for all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def begin_folder(folder: Path) -> Path:
    """An empty folder beside `folder` to write into; `finish_folder` puts it in its place."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_folder(unfinished: Path, folder: Path) -> None:
    """Let a complete folder appear under its own name, in place of an older one."""
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)  # Not deleted before the new one is in its place.
    os.replace(unfinished, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def on_rank_0(act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, or its OSError or ValueError, on every rank.

    Collective: nobody goes on before rank 0 is done.

    Were the error left to rank 0 alone, the others would wait for it until their group's timeout.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = act()
        except (OSError, ValueError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome
    if failure is not None:
        raise failure
    result: T = value
    return result
