from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from roll.workers import start_ray


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One local Ray for all tests of this folder, with four CPUs whatever the machine has."""
    assert start_ray(None, num_cpus=4)
    yield
    ray.shutdown()
