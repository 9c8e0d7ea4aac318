"""Finds an engine by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

from roll.generation.generator import Generator
from roll.named import find_class

SHARED = frozenset({"batches", "generator", "records", "registry", "weights"})
"""Files of this package that are no engine."""


def find_engine(name: str) -> type[Generator]:
    """The class that `name` stands for: a file of this package, or `module:Name` of a user's own `Generator`.

    Raises UserError if there is none.
    """
    found: type[Generator] = find_class(name, Generator, "roll.generation", "ENGINE", SHARED, "engine")
    return found
