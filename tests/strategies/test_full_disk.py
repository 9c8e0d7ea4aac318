"""A disk that is full while a checkpoint or a model is written: every rank hears it, and nothing older is lost."""

from __future__ import annotations

import builtins
import io
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from roll.errors import mistake
from tests.rank_pool import RankPool
from tests.strategies.test_refused_checkpoints import trained
from tests.strategies.tiny import make_batch, weighted_nll, write_tiny

ROOM = 10
"""Bytes that a file may have when the disk is full. The system refuses more, as it does on a full disk."""
FULL, GONE = "File too large", "No such file or directory"
Failure = tuple[str, int, str]
"""Pattern of the file that cannot be written, the rank that writes it, and the system's reason."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def no_room(rank: int, name: str, reason: str) -> Iterator[None]:
    """On one rank: from the moment at which a file of this name is opened, no file may grow or its folder is gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank != (dist.get_rank() if dist.is_initialized() else 0):
        yield
        return

    def watched(path: Any, *arguments: Any, **settings: Any) -> Any:
        if isinstance(path, str | os.PathLike) and fnmatch(os.fspath(path), f"*.unfinished/{name}"):
            if reason == GONE:
                shutil.rmtree(Path(path).parent)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
        return plain(path, *arguments, **settings)

    plain = io.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", watched)  # That of pathlib.
        patch.setattr(builtins, "open", watched)
        if name == "*.safetensors":  # Written by a library that is not Python.
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def together() -> None:
    """Wait until every rank has looked at the folder, before one of them writes again."""
    if dist.is_initialized():
        dist.barrier()


def fail(folder: Path, layout: dict[str, Any], home: Path, failures: list[Failure]) -> list[str]:
    """Save over an older checkpoint or model, once for each failure; what each says to the user of this rank."""
    told = []
    with trained(folder, layout) as strategy:

        def save(name: str) -> None:
            (strategy.save_hf if name == "model" else strategy.save_checkpoint)(home / name)
            together()

        for name in ("model", "checkpoint"):
            save(name)
        strategy.train_step(make_batch(seed=1), weighted_nll)
        for file, rank, reason in failures:
            name = "model" if file == "*.safetensors" else "checkpoint"
            before = contents(home / name)
            with no_room(rank, file, reason), pytest.raises(OSError, match=reason) as error:
                save(name)
            told.append(mistake(error.value) or "a traceback")
            assert contents(home / name) == before, file
            assert sorted(path.name for path in home.iterdir()) == ["checkpoint", "model"], file
            together()
        strategy.load_checkpoint(home / "checkpoint")  # The older one is whole.
        for name in ("model", "checkpoint"):
            save(name)
            strategy.load_checkpoint(home / "checkpoint")
    return told


BY_RANK_0 = [
    (name, 0, reason)
    for name in (".metadata.tmp", "common.pt", "metadata.json", "checksums.json")
    for reason in (FULL, GONE)
]
OF_TENSORS = [(name, rank, FULL) for name in ("*.distcp", "*.safetensors") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("world_size", "layout", "failures"),
    [
        (
            1,
            {"name": "hf"},
            [("state.pt", 0, FULL), ("state.pt", 0, GONE), ("checksums.json", 0, FULL), ("*.safetensors", 0, FULL)],
        ),
        (2, {"pp": 2}, BY_RANK_0 + OF_TENSORS + [("__1_0.distcp", 1, GONE)]),
    ],
    ids=["hf", "pp 2"],
)
def test_a_full_disk(
    ranks: RankPool, tmp_path: Path, world_size: int, layout: dict[str, Any], failures: list[Failure]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    told = ranks.run(fail, write_tiny(tmp_path / "tiny"), layout, home, failures, world_size=world_size)
    for of_rank in told:
        for line, (file, _, reason) in zip(of_rank, failures, strict=True):
            name = "model" if file == "*.safetensors" else "checkpoint"
            assert line == f"{home / name}: the {name} cannot be written: {reason}", file
