"""What twenty runs one after the other leave behind: nothing."""

from __future__ import annotations

import time

import psutil
import pytest
import ray
import torch

from roll.parallel.degrees import ParallelDegrees
from roll.protocol import DataProto
from roll.workers import Cluster, Placement, PlacementLayout, WorkerFailed
from tests.workers.probes import Probe

RUNS = 20


def run(fails: bool) -> list[int]:
    """One run of two ranks in a gloo group, with a megabyte through the object store; the ranks' process ids.

    If it fails, then by a kill, while the peer waits in a collective.
    """
    data = DataProto.from_dict({"x": torch.arange(2), "large": torch.zeros(2, 125_000)})
    with Placement(PlacementLayout({"probe": 2})) as placement:
        cluster = Cluster(Probe, role="probe", degrees=ParallelDegrees(2), placement=placement)
        cluster.call("init_group")
        assert cluster.call("rows", data) == [[0], [1]]
        pids = cluster.call("alive")
        if fails:
            with pytest.raises(WorkerFailed, match="The actor died"):
                cluster.call("fail_on", 1, "sigkill")
    return pids


def held() -> dict[str, int]:
    """What this process and Ray's own hold. Workers that Ray keeps ready for any job come and go, and do not count."""
    own = psutil.Process()
    lasting = [own, *(child for child in own.children(recursive=True) if "ray::" not in " ".join(child.cmdline()))]
    ports = [c for process in lasting for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    shared = [
        file for process in lasting for file in process.memory_maps(grouped=False) if file.path.startswith("/dev/shm")
    ]
    stored = int(ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"])
    return {"ports": len(ports), "shared memory": len(shared), "files": own.num_fds(), "stored bytes": stored}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("local_ray")
def test_twenty_runs_leave_nothing_behind() -> None:
    run(fails=False)
    run(fails=True)
    before = held()
    pids = [pid for number in range(RUNS) for pid in run(fails=number % 4 == 3)]
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    after = held()
    print(f"before {before}, after {after}")
    # A few connections to Ray's idle workers open and close at any time.
    slack = {"ports": 0, "shared memory": 0, "files": 8, "stored bytes": 0}
    assert all(after[what] <= before[what] + slack[what] for what in before), (before, after)
