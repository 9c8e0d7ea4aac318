"""A driver that waits for ranks in a collective until it is interrupted; run by test_cluster.py."""

from __future__ import annotations

import ray

from roll.parallel.degrees import ParallelDegrees
from roll.workers import Placement, PlacementLayout, WorkerError, start_ray
from tests.workers.probes import Probes


def main() -> None:
    layout = PlacementLayout({"probe": 2})
    start_ray(None, num_cpus=layout.num_bundles)
    with Placement(layout) as placement:
        role = Probes(role="probe", degrees=ParallelDegrees(2, tp=2), placement=placement)
        role.init_group()
        pids = role.alive()
        try:
            print(*pids, flush=True)  # What the interruption waits for, so it may come at once.
            role.meet_without(1)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        try:
            role.alive()
        except WorkerError as error:
            print(error, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
