"""Fields by name: which are known, and under which names they go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def known(names: Sequence[str] | Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    """The names, if all of them are fields. Raises KeyError that names the known ones, ValueError for a bare string."""
    if isinstance(names, str):
        raise ValueError(f"names are given as a list, got {names!r}")
    unknown = [name for name in names if name not in fields]
    if unknown:
        raise KeyError(f"no field {', '.join(unknown)}; there are {', '.join(sorted(fields)) or 'none'}")
    return list(names)


def listed(names: str | Sequence[str]) -> list[str]:
    """One name or several, as a list."""
    return [names] if isinstance(names, str) else list(names)


def new_names(
    old_keys: str | Sequence[str], new_keys: str | Sequence[str], fields: Mapping[str, Any]
) -> dict[str, str]:
    """For every field the name it has after `rename(old_keys, new_keys)`; ValueError if two would share one."""
    old, new = listed(old_keys), listed(new_keys)
    if len(old) != len(new) or len(set(old)) != len(old):
        raise ValueError(f"rename needs one new name for each old name, got {old} and {new}")
    renamed = dict(zip(known(old, fields), new, strict=True))
    names = {name: renamed.get(name, name) for name in fields}
    later = list(names.values())
    shared = sorted({name for name in later if later.count(name) > 1})
    if shared:
        raise ValueError(f"rename: two fields would be named {', '.join(shared)}")
    return names


def check_kinds(fields: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse a tensor in the place of objects, and objects in the place of a tensor."""
    for name in fields.keys() & new.keys():
        if isinstance(fields[name], Tensor) != isinstance(new[name], Tensor):
            ours, theirs = type(fields[name]).__name__, type(new[name]).__name__
            raise ValueError(f"update: {name} is {ours}, the new value is {theirs}")
