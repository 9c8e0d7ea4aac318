"""Problems of a config, as data: problems are collected and reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from roll.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One setting and what is wrong with it. Its text is the line that the user reads: `actor.parallel.tp: ...`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message

    def under(self, parent: str) -> Problem:
        """The same problem, seen from the section that holds `parent`."""
        return Problem(".".join(part for part in (parent, self.path) if part), self.message)


class ConfigError(UserError):
    """Settings that cannot be used. Its message has one line for each of its `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def under(self, parent: str) -> ConfigError:
        """The same problems, seen from the section that holds `parent`."""
        return ConfigError([problem.under(parent) for problem in self.problems])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class UnavailableError(Exception):
    """A check asked for a setting that has a problem of its own, so there is nothing to compare with."""


Check = Callable[[], Iterable[Problem]]
"""A check yields the problems it finds, and none if all is well."""


def run_checks(checks: Iterable[Check]) -> list[Problem]:
    """All problems that `checks` find. A check that needs an unusable setting is skipped; the others still run."""
    found: list[Problem] = []
    for check in checks:
        try:
            found.extend(check())
        except UnavailableError:
            continue
    return found
