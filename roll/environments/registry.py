"""Finds an environment by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

from roll.environments.environment import Environment
from roll.named import find_class

SHARED = frozenset({"environment", "episodes", "registry", "scoring"})
"""Files of this package that are no environment."""


def find_environment(name: str) -> type[Environment]:
    """The class that `name` stands for: a file of this package, or `module:Name` of a user's own `Environment`.

    Raises UserError if there is none.
    """
    found: type[Environment] = find_class(name, Environment, "roll.environments", "ENVIRONMENT", SHARED, "environment")
    return found
