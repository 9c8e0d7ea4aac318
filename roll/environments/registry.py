"""Finds an environment by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

from roll.environments.environment import Environment
from roll.errors import UserError
from roll.named import load_listed, load_named

SHARED = frozenset({"environment", "episodes", "registry", "scoring"})
"""Files of this package that are no environment."""


def find_environment(name: str) -> type[Environment]:
    """The class that `name` stands for: a file of this package, or `module:Name` of a user's own `Environment`.

    Raises UserError if there is none.
    """
    if ":" in name:
        found = load_named(name, "reward.environment", "Environment")
    else:
        found = load_listed(name, "roll.environments", "ENVIRONMENT", SHARED, "an environment")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise UserError(f"environment {name!r} is no subclass of roll.environments.environment.Environment")
    return found
