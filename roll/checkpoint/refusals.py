"""Reasons for which a checkpoint cannot be loaded, in one wording for all strategies."""

from __future__ import annotations

from collections.abc import Mapping

from roll.errors import UserError


def check_same_model(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if the tensors of a checkpoint and those of this model differ in name or shape."""
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            shapes = f"{theirs.get(name)} there, {ours.get(name)} here"
            raise UserError(f"the checkpoint is of another model: {name} has shape {shapes}")
