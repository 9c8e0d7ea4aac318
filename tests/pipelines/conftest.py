"""One Ray, and one finished run, for all tests that need them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pipelines.small_run import ROOT, end, run

RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True)
class Head:
    """A Ray of the tests' own."""

    address: str
    """For a driver, as `RAY_ADDRESS`."""
    job_server: str
    """For `ray job submit`."""
    environment: dict[str, str]
    """What processes that use it need."""


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """The README's way onto a cluster: `ray start --head`."""
    port, dashboard = _free_port(), _free_port()
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={port}", "--disable-usage-stats"]
    command += ["--node-ip-address=127.0.0.1", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
    # As in an activated environment: a job runs the `python` that the head finds first.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    packages = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"RAY_AUTH_MODE": "disabled", "PATH": path, "PYTHONPATH": packages}
    log_file = tmp_path_factory.mktemp("ray") / "head.log"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in log_file.read_text():
                assert process.poll() is None and time.monotonic() < deadline, log_file.read_text()
                time.sleep(0.1)
            yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                end(process)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="session")
def first_run(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    output_dir = tmp_path_factory.mktemp("runs")
    outcome = run(output_dir, "name=first", RAY_ADDRESS=head.address, **head.environment)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return output_dir / "first"
