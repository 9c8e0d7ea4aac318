"""Ray actors that hold the roles of a run: dispatch rules, workers, clusters, placement, failures.

Names are loaded on first use, so that the pure parts (the dispatch rules, the layout of bundles) need no Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.workers.calls import PendingCall
    from roll.workers.cluster import Cluster
    from roll.workers.connection import start_ray
    from roll.workers.dispatch import Dispatch
    from roll.workers.errors import CallTimedOut, WorkerError, WorkerFailed
    from roll.workers.method import RemoteMethod, register
    from roll.workers.placement import Placement, PlacementLayout
    from roll.workers.remote_batch import as_batch
    from roll.workers.role import Role
    from roll.workers.worker import Worker

_HOME = {
    "CallTimedOut": "errors",
    "Cluster": "cluster",
    "Dispatch": "dispatch",
    "PendingCall": "calls",
    "Placement": "placement",
    "PlacementLayout": "placement",
    "RemoteMethod": "method",
    "Role": "role",
    "Worker": "worker",
    "WorkerError": "errors",
    "WorkerFailed": "errors",
    "as_batch": "remote_batch",
    "register": "method",
    "start_ray": "connection",
}

__all__ = [
    "CallTimedOut",
    "Cluster",
    "Dispatch",
    "PendingCall",
    "Placement",
    "PlacementLayout",
    "RemoteMethod",
    "Role",
    "Worker",
    "WorkerError",
    "WorkerFailed",
    "as_batch",
    "register",
    "start_ray",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
