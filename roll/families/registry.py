"""Finds a family by its name: one of this package's files, or one of a user's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from roll.errors import UserError
from roll.families.family import Family
from roll.families.tensors import WQKV
from roll.named import load_named, unknown_name

SHARED = frozenset({"family", "registry", "tensors"})
"""Files of this package that are no family."""


def _declared() -> dict[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    families = [importlib.import_module(f"roll.families.{name}").FAMILY for name in names if name not in SHARED]
    return {family.model_type: family for family in families}


FAMILIES: Mapping[str, Family] = _declared()
"""The families of this package by model_type."""


def find_family(name: str) -> Family:
    """The family that `name` stands for: a model_type of `FAMILIES`, or `module:Name` of a user's own `Family`.

    Raises UserError if there is none.
    """
    if ":" in name:
        family = load_named(name, "family", "Family")
        if not isinstance(family, Family):
            raise UserError(f"family {name!r} is a {type(family).__name__}, not a roll.families.Family")
        return family
    if name in FAMILIES:
        return FAMILIES[name]
    raise unknown_name(name, FAMILIES, "a family")


def stand_in(family: Family) -> str | None:
    """The name of the family that transformers has the same network under; None: this one.

    Raises UserError if that is another network: its q, k and v are not apart, or it lacks biases or norms.
    """
    name = family.in_transformers
    if name is None:
        return None
    other = find_family(name)
    ours, theirs = ((each.qkv_bias, each.qk_norm, each.tensors.keys()) for each in (family, other))
    if ours != theirs or isinstance(other.tensors[WQKV], str):
        raise UserError(f"family {family.model_type!r}: in_transformers {name!r} is not the same network")
    return name
