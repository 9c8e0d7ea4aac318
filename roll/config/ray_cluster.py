"""Settings of the Ray cluster that holds the roles of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from roll.config.settings import Settings

Delivery = Literal["object_store", "broadcast"]


class RaySettings(Settings):
    """The Ray cluster that holds the roles."""

    address: str | None = None
    """Address of a running cluster; null: the one around this process if there is one, or else a local one."""
    connect_timeout_s: PositiveFloat = 25
    """Seconds within which a running cluster must answer."""
    call_timeout_s: PositiveFloat = 3600
    """Longest time in seconds that one call to a role may take."""
    start_timeout_s: PositiveFloat = 300
    """Seconds within which the processes of a role must have started."""
    placement_timeout_s: PositiveFloat = 30
    """Seconds for which a run waits for CPUs and devices that another run holds."""
    delivery: Delivery = "object_store"
    """Way of a batch's rows to the ranks that share it: all take them from Ray's object store, which is one memory
    for all ranks of a host; or the leader does, and broadcasts them over the process groups."""
    num_cpus: PositiveInt | None = None
    """CPUs that a local cluster offers; null: those of the machine."""
