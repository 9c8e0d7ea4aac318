"""What runs one after the other leave behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import ray
import torch

from roll.parallel.degrees import ParallelDegrees
from roll.protocol import DataProto
from roll.workers import Placement, PlacementLayout, WorkerFailed
from tests.processes import command_line, descendants, processes_of, wait_for_end, wait_until
from tests.workers.probes import Probes

RUNS = 6
SPARE_FILES = 5
"""Connections to Ray's idle workers that open and close at any time; fewer than one for each run."""


def run(fails: bool) -> list[psutil.Process]:
    """One run of two ranks in a gloo group, with a megabyte through the object store; the ranks' processes.

    If it fails, then by a kill, while the peer waits in a collective.
    """
    data = DataProto.from_dict({"x": torch.arange(2), "large": torch.zeros(2, 125_000)})
    with Placement(PlacementLayout({"probe": 2})) as placement:
        role = Probes(role="probe", degrees=ParallelDegrees(2), placement=placement)
        role.init_group()
        assert role.rows(data) == [[0], [1]]
        ranks = processes_of(role.alive())
        if fails:
            with pytest.raises(WorkerFailed, match="The actor died"):
                role.fail_on(1, "sigkill")
    return ranks


def lasting_processes() -> list[psutil.Process]:
    """This one, and those of its Ray that live as long as Ray does. Workers come and go, also without being asked."""
    session = Path(ray.nodes()[0]["RayletSocketName"]).parents[1].name
    commands = {process: command_line(process) for process in descendants(os.getpid())}
    programs = ("raylet", "gcs_server")
    rays = [
        process
        for process, command in commands.items()
        if command and Path(command[0]).name in programs and session in " ".join(command)
    ]
    assert len(rays) == len(programs)
    return [psutil.Process(), *rays]


def held(lasting: list[psutil.Process]) -> dict[str, int]:
    """What these processes hold, and what is in Ray's object store."""
    ports = [c for process in lasting for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    shared = [
        file for process in lasting for file in process.memory_maps(grouped=False) if file.path.startswith("/dev/shm")
    ]
    stored = int(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
    return {"ports": len(ports), "shared memory": len(shared), "files": lasting[0].num_fds(), "stored bytes": stored}


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_six_runs_leave_nothing_behind() -> None:
    run(fails=False)
    run(fails=True)
    lasting = lasting_processes()
    before = held(lasting)
    ranks = [rank for number in range(RUNS) for rank in run(fails=number % 4 == 3)]
    wait_for_end(ranks)
    most = {what: amount + (SPARE_FILES if what == "files" else 0) for what, amount in before.items()}
    after: dict[str, int] = {}

    def all_is_given_back() -> bool:  # Ray says some moments later what it has freed.
        after.update(held(lasting))
        return all(after[what] <= most[what] for what in most)

    try:
        wait_until(all_is_given_back)
    finally:
        print(f"before {before}, after {after}")
