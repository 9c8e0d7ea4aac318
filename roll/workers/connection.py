"""The way to Ray: a running cluster, which must answer in time, or one that is started here.

`ray.init` has no time limit: with an address that nobody serves it tries for minutes. So a running cluster is asked
first, by a connection to its port and then by a `ray.init` in a process that can be ended.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from roll.config import ConfigError, Problem

T = TypeVar("T")

ENVIRONMENT = "RAY_ADDRESS"
JOB_ENVIRONMENT = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that makes a driver that of a submitted job. The process that only asks is none."""
HOST_AND_PORT = re.compile(r"(?:ray://)?(?P<host>\[[^\[\]]+\]|[^:/\[\]\s]+):(?P<port>\d{1,5})")
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
FREE_AT_ONCE: dict[str, Any] = {"free_objects_batch_size": 1}
"""Has a Ray of our own free an object as soon as nobody refers to it. By default it frees a hundred at once, or once in
a second: buckets of weights would pile up. For a cluster it is RAY_free_objects_batch_size=1 at `ray start`."""
GAVE_UP = ("The current node timed out during startup", "Timed out waiting for node info")
"""Ray's words where its own processes take more than 30 s to start. It has no setting for this time."""
PROBE = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"


def start_ray(address: str | None, num_cpus: int, timeout_s: float = 25.0) -> bool:
    """Connect to the Ray cluster at `address`, or of RAY_ADDRESS (which a submitted job has), else start one here.

    A local Ray gets as many CPUs as the machine has, and at least `num_cpus`: the CPUs of Ray only count processes, so
    a run of 4 ranks also works on 2 cores. Returns whether this call started or joined Ray: the caller then owes a
    `ray.shutdown()`.

    Args:
        address: `host:port`, `ray://host:port`, `auto` for a cluster on this machine, `local` for a new one.
        timeout_s: seconds within which a running cluster must have answered.

    Raises ConfigError, which names address and setting, if there is no cluster that answers.
    """
    if ray.is_initialized():
        return False
    setting, wanted = "ray.address", address or "local"
    if address in (None, "", "auto") and os.environ.get(ENVIRONMENT):  # Which Ray too prefers to `auto`.
        setting, wanted = ENVIRONMENT, os.environ[ENVIRONMENT]
    if wanted == "local":
        cpus = max(num_cpus, os.cpu_count() or 1)
        own: dict[str, Any] = {"include_dashboard": False, "_system_config": FREE_AT_ONCE}
        started(lambda: ray.init(address="local", num_cpus=cpus, **own, **QUIET))
    else:
        check_cluster(setting, wanted, timeout_s)
        ray.init(address=wanted, **QUIET)
    return True


def started(start: Callable[[], T], attempts: int = 5) -> T:
    """The value of `start`, which starts a Ray; it is called again where Ray did not wait for a busy machine."""
    for _ in range(attempts - 1):
        try:
            return start()
        except Exception as error:  # Ray's own is of no narrower type
            if not any(words in str(error) for words in GAVE_UP):
                raise
    return start()


def check_cluster(setting: str, address: str, timeout_s: float) -> None:
    """Connect to a running cluster once, and leave it. Raises ConfigError as `start_ray` does."""

    def problem(what: str) -> ConfigError:
        way_out = "start it (ray start --head), or set no address to run on a Ray of its own"
        return ConfigError([Problem(setting, f"{what}: {way_out}")])

    deadline = time.monotonic() + timeout_s
    parts = HOST_AND_PORT.fullmatch(address)
    if parts is not None and int(parts["port"]) < 1 << 16:
        try:
            _connect(parts["host"].strip("[]"), int(parts["port"]), deadline)
        except OSError as error:
            raise problem(f"no Ray cluster answers at {address!r} ({error})") from error
    elif address != "auto" and not re.match(r"(?!ray:)\w+://", address):  # Other schemes are those of Ray's plugins.
        raise problem(f"must be host:port, ray://host:port or auto, got {address!r}")
    environment = {name: value for name, value in os.environ.items() if name not in (ENVIRONMENT, JOB_ENVIRONMENT)}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", PROBE, address],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        tried = re.search(rb"address (\S+:\d+)", error.stderr or b"")  # Which `auto` does not say.
        place = f" ({tried[1].decode()})" if tried else ""
        raise problem(f"no Ray cluster answers at {address!r}{place} within {timeout_s:g} s") from error
    if answer.returncode:
        reason = [line for line in answer.stderr.splitlines() if line.strip()][-1:]
        raise problem(f"no Ray cluster answers at {address!r} ({''.join(reason)})")


def _connect(host: str, port: int, deadline: float) -> None:
    """Open and close a connection. Raises OSError if nobody takes it before the deadline."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                connection.connect(place)
            except OSError as error:
                failure = error
            else:
                return
    raise failure
