from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from roll.workers import start_ray

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One local Ray for all tests of this folder, with four CPUs whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.delenv("RAY_ADDRESS", raising=False)
        started = start_ray(None, num_cpus=4)
        yield
        if started:
            ray.shutdown()
