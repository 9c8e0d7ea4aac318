"""One Ray, and one finished run, for all tests that need them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from roll.workers.connection import started
from tests.pipelines.small_run import run
from tests.processes import end, wait_until

RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True)
class Head:
    """A Ray of the tests' own."""

    address: str
    """For a driver, as `RAY_ADDRESS`."""
    job_server: str
    """For `ray job submit`."""


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """The README's way onto a cluster."""
    process, said = started(partial(start_head, tmp_path_factory.mktemp("ray") / "head.log"))
    try:
        yield Head(said_in(said, r"ray start --address='([^']+)'"), said_in(said, r"RAY_API_SERVER_ADDRESS='([^']+)'"))
    finally:
        end(process)


def start_head(log_file: Path) -> tuple[subprocess.Popen[str], str]:
    """`ray start --head`, here at ports that the system chooses; its process, and what it has printed."""
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", "--port=0", "--node-ip-address=127.0.0.1"]
    command += ["--dashboard-port=0", "--dashboard-host=127.0.0.1", "--dashboard-agent-listen-port=0"]
    command += ["--min-worker-port=0", "--max-worker-port=0", f"--ray-client-server-port={(client := free_port())}"]
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        # `--block` ends all of Ray if one of its processes has ended, and that of Ray Client is the last to be there.
        wait_until(lambda: "will now block" in log_file.read_text() and is_taken(client), process, log_file)
    except BaseException:
        end(process)
        raise
    return process, log_file.read_text()


def free_port() -> int:
    """A port of this machine that nobody has now. Ray Client alone takes none that the system chooses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_taken(port: int) -> bool:
    """Whether something listens at a port of this machine."""
    return any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in psutil.net_connections("tcp"))


def said_in(text: str, pattern: str) -> str:
    """What the group of a pattern matches in what Ray has printed."""
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


@pytest.fixture(scope="session")
def first_run(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    output_dir = tmp_path_factory.mktemp("runs")
    outcome = run(output_dir, "name=first", RAY_ADDRESS=head.address)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return output_dir / "first"
