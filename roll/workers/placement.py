"""Placement of the ranks of a run's roles: one Ray placement group for all of them.

Bundle r holds rank r of every role, so roles share devices by default. A bundle has one CPU and, if a device role has a
rank there, one device; the roles in it share both in equal fractions. With the roles actor 2, critic 2, rollout 1,
reward 1 on GPUs, `reward` being a CPU role:

    bundle 0: CPU 1, GPU 1    actor 0, critic 0, rollout 0 (a third of the GPU each), reward 0
    bundle 1: CPU 1, GPU 1    actor 1, critic 1

On CPUs the fractions only order the processes; they all run when they have work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.errors import UserError
from roll.workers.calls import Watch


@dataclass(frozen=True)
class PlacementLayout:
    """The bundles that a set of roles needs.

    `roles` maps each role to its number of ranks. `device` is the resource that a rank computes on, as Ray names it:
    "CPU", "GPU", or a custom resource. `cpu_roles` do without the device.
    """

    roles: Mapping[str, int]
    device: str = "CPU"
    cpu_roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.roles:
            raise UserError("a placement needs at least one role")
        for role, ranks in self.roles.items():
            if ranks < 1:
                raise UserError(f"{role}: the number of ranks must be at least 1, got {ranks}")
        unknown = set(self.cpu_roles) - set(self.roles)
        if unknown:
            raise UserError(f"cpu_roles names {sorted(unknown)}, the roles are {sorted(self.roles)}")

    @property
    def device_roles(self) -> dict[str, int]:
        """The roles that need a device of their own kind; none if the device is the CPU itself."""
        if self.device == "CPU":
            return {}
        return {role: ranks for role, ranks in self.roles.items() if role not in self.cpu_roles}

    @property
    def num_bundles(self) -> int:
        return max(self.roles.values())

    @property
    def num_devices(self) -> int:
        return max(self.device_roles.values(), default=0)

    def bundles(self) -> list[dict[str, float]]:
        """The resources of each bundle; those with a device come first."""
        with_device: list[dict[str, float]] = [{"CPU": 1.0, self.device: 1.0} for _ in range(self.num_devices)]
        return with_device + [{"CPU": 1.0} for _ in range(self.num_bundles - self.num_devices)]

    def totals(self) -> dict[str, int]:
        """Sum of the needs of all bundles."""
        need = {"CPU": self.num_bundles}
        return need | {self.device: self.num_devices} if self.num_devices else need

    def share(self, role: str) -> dict[str, float]:
        """The part of its bundle's resources that one rank of `role` asks for."""
        parts = {"CPU": _fraction(len(self.roles))}
        return parts | {self.device: _fraction(len(self.device_roles))} if role in self.device_roles else parts


class Placement:
    """The reserved bundles, and the roles that live in them. One for a run; a context manager.

    Leaving it stops all of its roles. Ray must be running (`start_ray`). Raises ValueError if Ray does not have the
    resources, or another job still holds them after `timeout_s`.
    """

    def __init__(self, layout: PlacementLayout, *, timeout_s: float = 30.0) -> None:
        self.layout = layout
        self.watches: list[Watch] = []
        _check_resources(layout, ray.cluster_resources(), "has")
        self._group = placement_group(layout.bundles(), strategy="PACK")
        reserved = False
        try:
            reserved = self._group.wait(timeout_s)
            if not reserved:
                _check_resources(layout, ray.available_resources(), "has free")
                raise UserError(f"Ray did not reserve {layout.bundles()} within {timeout_s:g} s")
        finally:
            if not reserved:
                remove_placement_group(self._group)
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self._bundle_of_rank = order_by_node(layout, [nodes[index] for index in range(layout.num_bundles)])
        self._closed = False

    def actor_options(self, role: str, rank: int) -> dict[str, Any]:
        """The options of `ray.remote` that put this rank into its bundle."""
        resources = self.layout.share(role)
        options: dict[str, Any] = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU", 0)}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundle_of_rank[rank]
        )
        return options | {"resources": resources, "scheduling_strategy": strategy}

    def shutdown(self) -> None:
        """Stop all roles and free the bundles. Calling it again does nothing."""
        for watch in self.watches:
            watch.actors.kill()
        for watch in self.watches:
            watch.actors.shutdown()
        self.watches.clear()
        if not self._closed:
            self._closed = True
            remove_placement_group(self._group)

    def __enter__(self) -> Placement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def order_by_node(layout: PlacementLayout, nodes: Sequence[str]) -> list[int]:
    """The bundle of each rank: those with a device first, and the bundles of one node together.

    `nodes[index]` is the node of bundle `index`. Ray packs bundles on nodes in any order; neighbouring ranks form the
    tensor-parallel groups, which should not cross nodes.
    """
    seen = {node: place for place, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda index: (index >= layout.num_devices, seen[nodes[index]], index))


def _fraction(parts: int) -> float:
    """1/parts, rounded down to the four digits with which Ray counts, so that the parts always fit into the whole."""
    return math.floor(1e4 / parts) / 1e4


def _check_resources(layout: PlacementLayout, found: Mapping[str, float], has: str) -> None:
    """Raises ValueError, naming both numbers, if `found` is less than the layout needs."""
    for resource, need in layout.totals().items():
        if found.get(resource, 0) < need:
            roles = ", ".join(f"{role} {ranks}" for role, ranks in layout.roles.items())
            raise UserError(
                f"the roles ({roles}) need {need} {resource}, the Ray cluster {has} {found.get(resource, 0):g}"
            )
