"""Finds an engine by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

from roll.errors import UserError
from roll.generation.generator import Generator
from roll.named import load_listed, load_named

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
    if not (isinstance(engine, type) and issubclass(engine, Generator)):
        raise UserError(f"engine {name!r} is no subclass of roll.generation.generator.Generator")
    return engine
