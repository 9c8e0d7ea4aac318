"""Finds an engine by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

from roll.generation.generator import Generator
from roll.named import load_listed, load_named, subclass_of

SHARED = frozenset({"batches", "generator", "records", "registry", "weights"})
"""Files of this package that are no engine."""


def find_engine(name: str) -> type[Generator]:
    """The class that `name` stands for: a file of this package, or `module:Name` of a user's own `Generator`.

    Raises UserError if there is none.
    """
    if ":" in name:
        engine = load_named(name, "engine", "Generator")
    else:
        engine = load_listed(name, "roll.generation", "ENGINE", SHARED, "an engine")
    found: type[Generator] = subclass_of(Generator, engine, f"engine {name!r}")
    return found
