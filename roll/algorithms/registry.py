"""Finds an algorithm by its name: one of this package's files, or a class of a user's own."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from roll.algorithms.algorithm import Algorithm, AlgorithmSettings
from roll.named import check_names, load_named, subclass_of, unknown_name

SHARED = frozenset(
    {
        "aggregate",
        "algorithm",
        "gae",
        "groups",
        "kl",
        "kl_control",
        "loss_term",
        "losses",
        "masking",
        "registry",
        "terms",
    }
)
"""Files of this package that are no algorithm."""

ALGORITHMS = tuple(
    sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name not in SHARED)
)
"""Names of the algorithms of this package."""


def find_algorithm(name: str) -> type[Algorithm]:
    """The class that `name` stands for: a file of this package, or `module:Name` of a user's own `Algorithm`.

    Raises UserError if there is none, or one that lacks what an algorithm must declare.
    """
    if ":" in name:
        found: type[Algorithm] = subclass_of(
            Algorithm, load_named(name, "algorithm", "Algorithm"), f"algorithm {name!r}"
        )
        return found
    if name not in ALGORITHMS:
        raise unknown_name(name, ALGORITHMS, "an algorithm")
    algorithm: type[Algorithm] = importlib.import_module(f"roll.algorithms.{name}").ALGORITHM
    return algorithm


def settings_of(name: str) -> type[AlgorithmSettings]:
    """The class of the settings of an algorithm. Raises UserError as `find_algorithm` does."""
    return find_algorithm(name).settings_type()


def make_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """The algorithm that these settings name. Raises UserError if it declares roles or fields that are no set."""
    algorithm = find_algorithm(settings.name)(settings)
    check_names(f"algorithm {settings.name!r}", roles=algorithm.roles, reads=algorithm.reads, makes=algorithm.makes)
    return algorithm
