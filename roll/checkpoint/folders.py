"""Folders that appear only when they are complete, that one rank makes for all, and that replace only their like."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from roll.errors import UserError

T = TypeVar("T")

CHECKPOINT_FILES = ("checksums.json", "state.pt", "common.pt", ".metadata", "metadata.json", "*.distcp")
"""Files of a checkpoint: the first of every strategy, the second of hf, all others of Megatron-Core."""


class Kind(Enum):
    """Contents of a folder that is written as a whole. An older folder is replaced if it is of the same kind."""

    MODEL = "model"
    CHECKPOINT = "checkpoint"


def begin_folder(folder: Path, kind: Kind) -> Path:
    """An empty folder beside `folder` to write into; `finish_folder` puts it in its place.

    Raises:
        ValueError: `folder` may not be replaced, see `refuse_to_replace`.
    """
    refuse_to_replace(folder, kind)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_folder(unfinished: Path, folder: Path) -> None:
    """Let a complete folder appear under its own name, in place of an older one."""
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    older = folder.exists()
    if older:
        os.replace(folder, replaced)  # Not deleted before the new one is in its place.
    try:
        os.replace(unfinished, folder)
    except OSError:
        if older:
            os.replace(replaced, folder)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def refuse_to_replace(folder: Path, kind: Kind) -> None:
    """Raise ValueError if writing a `kind` as `folder` would delete anything but an older one.

    Refused are the working directory, the home folder and all folders around them; a file; and a folder with other
    contents: a model folder has a config.json that names a model, a checkpoint has nothing but its own files.
    """
    place = folder.resolve()
    way_out = "give the name of a new folder"
    for name, used in (("working directory", Path.cwd()), ("home folder", Path(os.path.expanduser("~")).resolve())):
        if place == used or place in used.parents:
            where = "is" if place == used else "lies around"
            raise UserError(f"{folder} {where} the {name} {used}, which a {kind.value} would replace: {way_out} in it")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file, which a {kind.value} would replace: {way_out}")
    foreign = _foreign(folder, kind)
    if foreign:
        raise UserError(
            f"{folder} holds {', '.join(foreign)}, and is no {kind.value} that a new one may replace: {way_out}, or "
            "move these files elsewhere"
        )


def _foreign(folder: Path, kind: Kind) -> list[str]:
    """Names of a few files that speak against `folder` being empty or of this kind."""
    names = sorted(path.name for path in folder.iterdir())
    if kind is Kind.CHECKPOINT:
        names = [name for name in names if not any(fnmatch(name, pattern) for pattern in CHECKPOINT_FILES)]
    elif _names_a_model(folder / "config.json"):
        names = []
    return names[:3]


def _names_a_model(config: Path) -> bool:
    """Whether it is the config.json of a model; many other programs have a file of this name."""
    try:
        content = json.loads(config.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(content, dict) and not content.keys().isdisjoint({"model_type", "architectures"})


def on_rank_0(act: Callable[[], T]) -> T:
    """Result of `act` on rank 0, or its OSError or ValueError, on every rank.

    Collective: nobody goes on before rank 0 is done.

    Were the error left to rank 0 alone, the others would wait for it until their group's timeout.
    """
    outcome: list[_Outcome[T] | None] = [_tried(act) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(outcome, src=0)
    assert outcome[0] is not None
    return outcome[0].value()


def on_every_rank(act: Callable[[], T]) -> T:
    """Result of `act` on this rank, or the first rank's OSError or ValueError, on every rank.

    Collective: nobody goes on before every rank is done.
    """
    own = _tried(act)
    failures: list[OSError | ValueError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, own.failure)
    first = next((failure for failure in failures if failure is not None), None)
    return replace(own, failure=first).value()


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """Result of an act, or the error in its place."""

    result: T | None = None
    failure: OSError | ValueError | None = None

    def value(self) -> T:
        """The result. Raises the error."""
        if self.failure is not None:
            raise self.failure
        return cast(T, self.result)


def _tried(act: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(act())
    except (OSError, ValueError) as error:
        return _Outcome(failure=error)


def alone(act: Callable[[], T]) -> T:
    """Act in a process that is a world of its own; see `on_rank_0`."""
    return act()


@contextmanager
def new_folder(folder: Path, kind: Kind, once: Callable[[Callable[[], Any]], Any] = on_rank_0) -> Iterator[Path]:
    """Folder to write into, which takes the place of `folder` when the block ends.

    Args:
        once: acts for all ranks: `on_rank_0`, where the block is collective and raises an OSError on every rank, or
            `alone`.

    Raises:
        ValueError: `folder` may not be replaced, see `refuse_to_replace`.
        OSError: something could not be written, with `folder` and the system's reason. `folder` is then as it was, and
            what was written is removed, since it may have filled the disk.
    """
    unfinished: Path | None = None
    try:
        unfinished = once(partial(begin_folder, folder, kind))
        yield unfinished
        once(partial(finish_folder, unfinished, folder))
    except OSError as error:
        if unfinished is not None:
            once(partial(shutil.rmtree, unfinished, ignore_errors=True))
        reason = f"the {kind.value} cannot be written: {error.strerror or error}"
        raise OSError(error.errno, reason, str(folder)) from error
