"""Deals the tests to the processes of one run: `make test` has two, each with ranks and a Ray of its own."""

from __future__ import annotations

from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("pipelines", "workers")
"""Folders whose tests share a Ray or a finished run, and so a process. They take longest, and come first."""


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests with those of `TOGETHER` in front, so that what is dealt last is short."""
    return sorted(items, key=lambda item: rank(item.nodeid))


def rank(nodeid: str) -> int:
    """Place of a test's folder in `TOGETHER`; the same number for all other folders."""
    folder = folder_of(nodeid)
    return TOGETHER.index(folder) if folder in TOGETHER else len(TOGETHER)


def folder_of(nodeid: str) -> str:
    """The folder of `tests` that a test lies in: `data` of `tests/data/test_plan.py::test_rows`; "" for none."""
    parts = PurePath(nodeid.partition("::")[0]).parts
    return parts[1] if len(parts) > 2 else ""


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process that has nothing left the tests of the next file, or of the next folder of `TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        folder = folder_of(nodeid)
        return folder if folder in TOGETHER else nodeid.partition("::")[0]
