"""The README's way onto a cluster: `ray start --head`, then `ray job submit` of the same file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.small_run import ROOT, SMALL

RAY = str(Path(sys.executable).with_name("ray"))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """A Ray head of this test's own; the address of its job server."""
    dashboard = free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={free_port()}", "--disable-usage-stats"]
    command += [f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
    with open(tmp_path / "head.log", "w") as log:
        process = subprocess.Popen(command, env=_environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{dashboard}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def _environment() -> dict[str, str]:
    # As in an activated environment: the job runs the `python` that the head finds first.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"RAY_AUTH_MODE": "disabled", "PATH": path}


@pytest.mark.slow
def test_the_same_file_runs_as_a_ray_job(head: str, tmp_path: Path) -> None:
    script = ["python", "examples/run_ppo.py", "--config", "examples/ppo_cpu.yaml", f"output_dir={tmp_path}"]
    submit = [RAY, "job", "submit", "--address", head, "--working-dir", ".", "--", *script, "name=job", *SMALL]
    deadline = time.monotonic() + 240
    while True:  # The job server comes up some seconds after the head.
        outcome = subprocess.run(
            submit, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=280, check=False
        )
        if outcome.returncode == 0 or time.monotonic() > deadline or "succeeded" in outcome.stdout:
            break
        if "step 0/2" in outcome.stdout:
            break  # It ran, and failed.
        time.sleep(2)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "step 2/2" in outcome.stdout
    assert (tmp_path / "job" / "final" / "config.json").is_file()
    assert (tmp_path / "job" / "metrics.jsonl").read_text().count("\n") == 3
