"""Ray actors that hold the roles of a run: dispatch rules, workers, clusters, placement, failures.

Names are loaded on first use, so that the pure parts (the dispatch rules, the layout of bundles) need no Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.workers.cluster import Cluster, PendingCall
    from roll.workers.connection import start_ray
    from roll.workers.dispatch import Dispatch, register
    from roll.workers.failure import CallTimedOut, WorkerError, WorkerFailed
    from roll.workers.placement import Placement, PlacementLayout
    from roll.workers.worker import Worker

_HOME = {
    "CallTimedOut": "failure",
    "Cluster": "cluster",
    "Dispatch": "dispatch",
    "PendingCall": "cluster",
    "Placement": "placement",
    "PlacementLayout": "placement",
    "Worker": "worker",
    "WorkerError": "failure",
    "WorkerFailed": "failure",
    "register": "dispatch",
    "start_ray": "connection",
}

__all__ = [
    "CallTimedOut",
    "Cluster",
    "Dispatch",
    "PendingCall",
    "Placement",
    "PlacementLayout",
    "Worker",
    "WorkerError",
    "WorkerFailed",
    "register",
    "start_ray",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
