"""Fixtures that several test folders share, and settings of hypothesis."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import isolation

# Before anything is imported that reads the environment.
HOME = isolation.make_home()
_of_the_tests = isolation.environment(os.environ, HOME)
os.environ.clear()
os.environ.update(_of_the_tests)

import pytest  # noqa: E402
from hypothesis import configuration, settings  # noqa: E402

from tests.dealing import ByFile, in_order  # noqa: E402
from tests.rank_pool import RankPool  # noqa: E402

configuration.set_hypothesis_home_dir(HOME / "hypothesis")
# No limit of time per example, which a busy machine exceeds, and the same examples always.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# A shell lets what it starts in the background ignore Ctrl-C, and so would the processes that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_order(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_sessionfinish(exitstatus: int) -> None:
    """After a failure the files stay: Ray's logs are among them."""
    if exitstatus == 0:
        shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def empty_folder() -> Iterator[Path]:
    """The working directory of all tests. The checkout has no new file after the last one."""
    before = isolation.files_of(isolation.ROOT)
    with isolation.working_directory(HOME) as folder:
        yield folder
    made = sorted(isolation.files_of(isolation.ROOT) - before)
    assert not made, f"the tests made files in the checkout: {', '.join(made)}"


@pytest.fixture(autouse=True)
def _nothing_left(empty_folder: Path) -> Iterator[None]:
    os.chdir(empty_folder)
    yield
    isolation.check_nothing_left(empty_folder)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for tests that need ranks; each starts when the first job needs it and lives until the end."""
    pool = RankPool(size=8)
    yield pool
    pool.close()
