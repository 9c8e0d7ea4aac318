"""A place of their own for the tests: environment variables, home, working directory, and Ray's files.

`tests/conftest.py` sets it up before anything else is imported. Processes that a test starts inherit all of it. So a
test finds nothing that the caller, an earlier run or a run beside this one has made, and leaves nothing for them:

    environment           only the variables in `KEPT`; none of a launcher, a scheduler, a proxy, a device
    HOME, and so caches   a folder that is removed after a run without failures
    RAY_TMPDIR            the same folder: where `ray start` and `ray.init` look for a cluster that is running
    working directory     an empty folder, which must be empty again after each test
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout. Tests read its code and its examples, and write nothing into it."""

KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR", "USER", "LOGNAME", "SHELL", "CI")
"""Variables of the caller that say where programs are and who runs them."""
KEPT_PREFIXES = ("PYTEST_", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")

FIXED = {
    # One thread per process: the tests start several ranks at once, and their sums must not depend on the core count.
    "OMP_NUM_THREADS": "1",
    # Megatron-Core's fused functions, which the CPU does without, load the compiler in each process: 2 s of its start.
    "TORCHDYNAMO_DISABLE": "1",
    # The tests compute on the CPU. A GPU of this machine may be somebody else's.
    "CUDA_VISIBLE_DEVICES": "",
    "LC_ALL": "C.UTF-8",
    # Nothing is fetched, and nobody is told.
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs its workers at nice 15, where they get next to nothing beside busy processes.
    "RAY_worker_niceness": "0",
    # Ray gives up where its own processes take some 15 s to start, as they do on a busy machine.
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "100000",
    # Ray's own default depends on what is found at home.
    "RAY_AUTH_MODE": "disabled",
}

LONGEST_HOME = 36
"""Characters. Ray puts sockets some 70 characters below, and the path of a socket has at most 107."""

# What tools write next to the code, and what belongs to others: hidden files and the runs of a user.
NOT_OURS = ("runs", "__pycache__", "build", "dist")


def make_home() -> Path:
    """A new folder with a short name."""
    home = Path(tempfile.mkdtemp(prefix="roll-"))
    if len(str(home)) <= LONGEST_HOME:
        return home
    home.rmdir()
    return Path(tempfile.mkdtemp(prefix="roll-", dir="/tmp"))


def environment(callers: Mapping[str, str], home: Path) -> dict[str, str]:
    """The variables of the tests, for a caller with these."""
    kept = {name: value for name, value in callers.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    # Python and its programs first on the path, as in an activated environment: a Ray job runs the first `python`.
    programs = Path(sys.executable).parent
    path = os.pathsep.join([str(programs), *filter(None, [kept.get("PATH")])])
    packages = os.pathsep.join([str(ROOT), *filter(None, [callers.get("PYTHONPATH")])])
    places = {"HOME": str(home), "RAY_TMPDIR": str(home), "PATH": path, "PYTHONPATH": packages}
    return kept | FIXED | places


@contextmanager
def working_directory(home: Path) -> Iterator[Path]:
    """An empty folder that is the working directory."""
    before, folder = Path.cwd(), home / "empty"
    folder.mkdir()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def check_nothing_left(folder: Path) -> None:
    """Raise AssertionError if something is in the working directory."""
    left = sorted(os.listdir(folder))
    for name in left:  # The next test is not to blame.
        (folder / name).rename(folder.with_name(f"left-{len(os.listdir(folder.parent))}-{name}"))
    assert not left, f"left in the working directory, where a test writes nothing: {', '.join(left)}"


def files_of(checkout: Path) -> set[str]:
    """Paths in a checkout, without hidden ones and `NOT_OURS`."""
    found = set()
    for folder, folders, files in os.walk(checkout):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.startswith(".")]
        found |= {os.path.relpath(os.path.join(folder, name), checkout) for name in files if not name.startswith(".")}
    return found
