"""Fields by name: which are known, and under which names they go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from roll.errors import UserError


class UnknownName(KeyError, UserError):
    """A batch does not have a name. A KeyError as of any mapping, and a ValueError as of any wrong argument."""

    def __str__(self) -> str:
        return str(self.args[0])


def listed(names: str | Iterable[str] | None) -> list[str]:
    """One name or several, as a list; None is no name."""
    return [names] if isinstance(names, str) else list(names or ())


def known(names: str | Iterable[str], there: Mapping[str, Any], what: str = "the batch") -> list[str]:
    """The names as a list. Raises UnknownName, with the names that are there, if `what` lacks one."""
    several = listed(names)
    lacking = [name for name in several if name not in there]
    if lacking:
        its = ", ".join(sorted(map(str, there))) or "nothing"
        raise UnknownName(f"{what} lacks {', '.join(map(str, lacking))}; it has {its}")
    return several


def new_names(
    old_keys: str | Iterable[str] | None, new_keys: str | Iterable[str] | None, fields: Mapping[str, Any]
) -> dict[str, str]:
    """For every field the name it has after `rename(old_keys, new_keys)`; ValueError if two would share one."""
    old, new = listed(old_keys), listed(new_keys)
    if len(old) != len(new) or len(set(old)) != len(old):
        raise UserError(f"rename needs one new name for each old name, got {old} and {new}")
    renamed = dict(zip(known(old, fields), new, strict=True))
    names = {name: renamed.get(name, name) for name in fields}
    later = list(names.values())
    shared = sorted({name for name in later if later.count(name) > 1})
    if shared:
        raise UserError(f"rename: two fields would be named {', '.join(shared)}")
    return names


def check_kinds(fields: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse a tensor in the place of objects, and objects in the place of a tensor."""
    for name in fields.keys() & new.keys():
        if isinstance(fields[name], Tensor) != isinstance(new[name], Tensor):
            ours, theirs = type(fields[name]).__name__, type(new[name]).__name__
            raise UserError(f"update: {name} is {ours}, the new value is {theirs}")
