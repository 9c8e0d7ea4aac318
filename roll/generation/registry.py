"""Finds an engine by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

from roll.config import EngineSettings
from roll.errors import UserError
from roll.generation.generator import Generator
from roll.named import check_names, find_class

SHARED = frozenset({"batches", "generator", "records", "registry", "weights"})
"""Files of this package that are no engine."""


def find_engine(name: str) -> type[Generator]:
    """The class that `name` stands for: a file of this package, or `module:Name` of a user's own `Generator`.

    Raises UserError if there is none, or what it declares is of another kind.
    """
    found: type[Generator] = find_class(name, Generator, "roll.generation", "ENGINE", SHARED, "engine")
    check_names(f"engine {name!r}", provides=found.provides)
    settings = found.settings_type
    if not (isinstance(settings, type) and issubclass(settings, EngineSettings)):
        raise UserError(f"engine {name!r}: settings_type must be a class of EngineSettings, got {settings!r}")
    return found
