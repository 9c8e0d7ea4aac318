"""Reasons for which a checkpoint cannot be loaded, in one wording for all strategies."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from roll.errors import UserError

UNREADABLE = (pickle.UnpicklingError, EOFError, RuntimeError)
"""Errors of `torch.load` and `pickle.load` on bytes that they did not write. A broken archive is a RuntimeError."""


@contextmanager
def damage_named(file: Path) -> Iterator[None]:
    """Turn the errors of reading a damaged file into a ValueError that names the file."""
    try:
        yield
    except UNREADABLE as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{file} is damaged, or not a file of a checkpoint: {first_line}") from error


def check_same_model(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the tensors of a checkpoint and those of this model differ in name or shape."""
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            shapes = f"{theirs.get(name)} there, {ours.get(name)} here"
            raise UserError(f"the checkpoint is of another model: {name} has shape {shapes}")
