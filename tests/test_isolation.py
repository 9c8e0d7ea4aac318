"""The tests see nothing of their caller, and leave nothing: `tests/isolation.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import isolation

# Of a caller who has a cluster, a launcher, a scheduler, a GPU, a proxy, caches and a narrow terminal.
CALLER = {
    "PATH": "/opt/bin",
    "HOME": "/home/somebody",
    "PYTHONPATH": "/home/somebody/lib",
    "PYTHONWARNINGS": "error",
    "RAY_ADDRESS": "10.0.0.1:6379",
    "RAY_TMPDIR": "/home/somebody/ray",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_PORT": "29500",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "CUDA_VISIBLE_DEVICES": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "ROLL_PLATFORM": "cuda",
    "HF_HOME": "/home/somebody/hf",
    "HF_DATASETS_CACHE": "/home/somebody/datasets",
    "http_proxy": "http://proxy:3128",
    "OMP_NUM_THREADS": "64",
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "CI": "true",
}


def test_of_the_callers_environment_only_places_of_programs_arrive(tmp_path: Path) -> None:
    found = isolation.environment(CALLER, tmp_path)
    programs, packages = found.pop("PATH").split(os.pathsep), found.pop("PYTHONPATH").split(os.pathsep)
    assert programs == [str(Path(sys.executable).parent), "/opt/bin"]
    assert packages == [str(isolation.ROOT), "/home/somebody/lib"]
    assert found == isolation.FIXED | {"HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path), "CI": "true"}


LOOK = """
import json, os
import huggingface_hub.constants, matplotlib, ray, torch
print(json.dumps([
    huggingface_hub.constants.HF_HOME, matplotlib.get_cachedir(), matplotlib.get_configdir(), torch.hub.get_dir(),
    ray._common.utils.get_default_ray_temp_dir(), os.getcwd(),
]))
"""


def test_caches_and_clusters_of_what_a_test_starts_are_its_own() -> None:
    """In a process, since a module of this one may have been asked before."""
    outcome = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    folders = [Path(folder) for folder in re.findall(r'"([^"]+)"', outcome.stdout)]
    assert len(folders) == 6
    assert [folder for folder in folders if Path(os.environ["HOME"]) not in folder.parents] == []


def test_the_working_directory_is_no_checkout(empty_folder: Path) -> None:
    assert Path.cwd() == empty_folder
    assert isolation.ROOT not in [empty_folder, *empty_folder.parents]


def test_what_a_test_leaves_in_the_working_directory_is_named_once(tmp_path: Path) -> None:
    with isolation.working_directory(tmp_path) as folder:
        isolation.check_nothing_left(folder)
        Path("runs").mkdir()
        Path("trace.json").touch()
        with pytest.raises(AssertionError, match=r"left in the working directory, .*: runs, trace\.json$"):
            isolation.check_nothing_left(folder)
        isolation.check_nothing_left(folder)


def test_new_files_of_a_checkout_are_seen_but_not_what_others_make(tmp_path: Path) -> None:
    before = isolation.files_of(tmp_path)
    theirs = ("runs/sft_cpu/config.yaml", ".hypothesis/data", "roll/__pycache__/a.pyc", "roll/.plan.py.swp")
    for name in ("roll/plan.py", "left.json", *theirs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert isolation.files_of(tmp_path) - before == {"left.json", "roll/plan.py"}


def test_a_home_is_short_enough_for_the_sockets_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 10)
    long.mkdir()
    monkeypatch.setattr(isolation.tempfile, "tempdir", str(long))
    home = isolation.make_home()
    home.rmdir()
    assert len(str(home)) <= isolation.LONGEST_HOME and not list(long.iterdir())


# What would bring a test back to what it shares with others.
SHARED: dict[str, Callable[[str], bool]] = {
    "a process that starts in the checkout": lambda line: bool(re.search(r"cwd=\w*ROOT", line)),
    "a port that is chosen before it is bound": lambda line: "getsockname()" in line,
    "a wait for time to pass": lambda line: bool(re.search(r"\btime\.sleep\(", line)),
    "an assertion on the clock": lambda line: bool(re.search(r"assert .*(monotonic|perf_counter)\(\) - ", line)),
    "processes of the whole machine": lambda line: bool(re.search(r"psutil\.(process_iter|pids|pid_exists)", line)),
}
# The last two need ports that are taken, and keep them. Ray Client takes no port that the system chooses.
MAY = {
    "tests/pipelines/conftest.py",
    "tests/test_isolation.py",
    "tests/processes.py",
    "tests/rank_pool.py",
    "tests/parallel/sequence/test_launch.py",
    "tests/workers/test_connection.py",
}


@pytest.mark.parametrize("kind", SHARED)
def test_no_test_brings_back(kind: str) -> None:
    found = [
        f"{path.relative_to(isolation.ROOT)}:{number}"
        for path in sorted((isolation.ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if SHARED[kind](line) and str(path.relative_to(isolation.ROOT)) not in MAY
    ]
    assert found == []


def test_what_a_test_may_not_have_is_recognised() -> None:
    lines = (
        "subprocess.run([], cwd=ROOT)",
        "return int(taken.getsockname()[1])",
        "    time.sleep(0.7)",
        "assert time.monotonic() - begun < 3",
        "while any(psutil.pid_exists(pid) for pid in pids):",
    )
    assert [[kind for kind in SHARED if SHARED[kind](line)] for line in lines] == [[kind] for kind in SHARED]
