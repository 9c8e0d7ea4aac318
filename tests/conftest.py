"""Fixtures that several test folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for tests that need ranks; each starts when the first job needs it and lives until the end."""
    pool = RankPool(size=4)
    yield pool
    pool.close()
