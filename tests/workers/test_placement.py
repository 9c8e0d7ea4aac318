"""Bundles of a run, worked out by hand, and what happens when Ray does not have them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

from roll.workers import Placement, PlacementLayout, start_ray
from roll.workers.placement import order_by_node


def test_roles_share_the_cpus() -> None:
    layout = PlacementLayout({"actor": 2, "critic": 4, "rollout": 1})
    assert layout.bundles() == [{"CPU": 1.0}] * 4
    assert layout.totals() == {"CPU": 4}
    assert layout.share("actor") == {"CPU": 0.3333}


def test_roles_share_devices_and_cpu_roles_take_none() -> None:
    layout = PlacementLayout({"actor": 2, "critic": 1, "reward": 3}, device="GPU", cpu_roles=("reward",))
    assert layout.bundles() == [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0}]
    assert layout.totals() == {"CPU": 3, "GPU": 2}
    assert layout.share("actor") == {"CPU": 0.3333, "GPU": 0.5}
    assert layout.share("reward") == {"CPU": 0.3333}


@pytest.mark.parametrize("roles", range(1, 13))
def test_shares_fit_into_a_bundle(roles: int) -> None:
    layout = PlacementLayout({f"role {index}": 1 for index in range(roles)}, device="NPU")
    for part in layout.share("role 0").values():
        assert round(part * 10_000) == pytest.approx(part * 10_000)  # Ray counts in ten-thousandths
        assert 0.9 < part * roles <= 1.0


def test_neighbouring_ranks_are_on_one_node() -> None:
    layout = PlacementLayout({"actor": 4, "reward": 6}, device="GPU", cpu_roles=("reward",))
    assert order_by_node(layout, ["b", "a", "b", "a", "a", "b"]) == [0, 2, 1, 3, 5, 4]


def test_bad_layouts() -> None:
    with pytest.raises(ValueError, match="at least one role"):
        PlacementLayout({})
    with pytest.raises(ValueError, match="actor: the number of ranks must be at least 1, got 0"):
        PlacementLayout({"actor": 0})
    with pytest.raises(ValueError, match=r"cpu_roles names \['judge'\], the roles are \['actor'\]"):
        PlacementLayout({"actor": 1}, cpu_roles=("judge",))


@pytest.mark.usefixtures("local_ray")
def test_missing_resources_are_named_and_not_waited_for() -> None:
    with pytest.raises(ValueError, match=r"the roles \(actor 5, critic 2\) need 5 CPU, the Ray cluster has 4"):
        Placement(PlacementLayout({"actor": 5, "critic": 2}))
    with pytest.raises(ValueError, match=r"the roles \(actor 1\) need 1 NPU, the Ray cluster has 0"):
        Placement(PlacementLayout({"actor": 1}, device="NPU"))


@pytest.mark.usefixtures("local_ray")
def test_resources_that_another_run_holds_are_named_and_come_back() -> None:
    with (
        Placement(PlacementLayout({"actor": 3})),
        pytest.raises(ValueError, match="need 2 CPU, the Ray cluster has free 1"),
    ):
        Placement(PlacementLayout({"actor": 2}), timeout_s=0.5)
    with Placement(PlacementLayout({"actor": 4})) as placement:
        placement.shutdown()


JOINS = """
import ray
from roll.workers import start_ray
assert start_ray(None, num_cpus=64)
print(ray.cluster_resources()["CPU"])
"""


@pytest.mark.usefixtures("local_ray")
def test_ray_is_joined_where_the_environment_names_one() -> None:
    assert not start_ray(None, num_cpus=64)  # this process has joined already
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    joined = subprocess.run([sys.executable, "-c", JOINS], env=environment, capture_output=True, text=True, check=True)
    assert joined.stdout == "4.0\n"
