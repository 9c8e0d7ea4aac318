"""Joining torch.distributed from what a launcher puts into the environment."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from roll.platform import get_platform

# What torch's own rendezvous reads, under the name that Slurm's srun gives each task.
SLURM_NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
DEFAULT_PORT = "29500"


def init_dist(
    launcher: Literal["pytorch", "slurm"] = "pytorch",
    backend: str | None = None,
    init_backend: Literal["torch", "deepspeed"] = "torch",
    *,
    timeout: timedelta | None = None,
) -> None:
    """Take this process's device and join torch.distributed. Collective over all processes of the launcher.

    Args:
        launcher: `pytorch` for torchrun, `slurm` for srun.
        backend: of torch.distributed; by default the one of this platform.
        init_backend: `deepspeed` tells DeepSpeed (which must be installed) of the process group as well.
        timeout: of collectives; torch's own by default.

    Raises:
        ValueError: an unknown launcher or init backend, or variables of the launcher that are missing.
        RuntimeError: torch.distributed is initialised already.
    """
    if init_backend not in ("torch", "deepspeed"):
        raise ValueError(f"init_backend must be torch or deepspeed, got {init_backend!r}")
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already")
    if init_backend == "deepspeed":
        import deepspeed  # before anything is joined, in case it is not installed
    os.environ.update(rendezvous(launcher, dict(os.environ)))
    platform = get_platform()
    platform.use_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend or platform.collective_backend, timeout=timeout)
    if init_backend == "deepspeed":
        deepspeed.init_distributed(dist_backend=backend or platform.collective_backend)


def rendezvous(launcher: str, environment: dict[str, str]) -> dict[str, str]:
    """`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` of a process with this environment.

    Raises:
        ValueError: the launcher is unknown, or did not set what it should.
    """
    names = {"pytorch": {name: name for name in SLURM_NAMES}, "slurm": SLURM_NAMES}.get(launcher)
    if names is None:
        raise ValueError(f"launcher must be pytorch or slurm, got {launcher!r}")
    needed = [*names.values(), *(["MASTER_ADDR", "MASTER_PORT"] if launcher == "pytorch" else [])]
    if launcher == "slurm" and "MASTER_ADDR" not in environment:
        needed.append("SLURM_JOB_NODELIST")
    missing = [name for name in needed if name not in environment]
    if missing:
        command = "torchrun" if launcher == "pytorch" else "srun"
        raise ValueError(f"init_dist({launcher!r}) found no {', '.join(missing)}: start the processes with {command}")
    found = {name: environment[theirs] for name, theirs in names.items()}
    # All ranks see the same list, so all of them find rank 0 on its first node.
    found["MASTER_ADDR"] = environment.get("MASTER_ADDR") or first_host(environment["SLURM_JOB_NODELIST"])
    found["MASTER_PORT"] = environment.get("MASTER_PORT", DEFAULT_PORT)
    return found


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form of a node list: `gpu[007-010,12]-ib,login` to `gpu007-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ValueError(f"no host in the node list {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())
