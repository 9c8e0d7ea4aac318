"""Fixtures that several test folders share, and settings of hypothesis."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.rank_pool import RankPool

# No limit of time per example, which a busy machine exceeds, and the same examples always.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# A shell lets what it starts in the background ignore Ctrl-C, and so would the processes that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for tests that need ranks; each starts when the first job needs it and lives until the end."""
    pool = RankPool(size=8)
    yield pool
    pool.close()
