"""Joining torch.distributed from what a launcher puts into the environment."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from roll.errors import UserError
from roll.parallel.rendezvous import join
from roll.platform import get_platform

# What torch's own rendezvous reads, under the name that Slurm's srun gives each task.
SLURM_NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
# Ports of Slurm jobs: above those of Ray's workers, below those that Linux gives to outgoing connections.
FIRST_PORT, PORTS = 20_000, 12_000


def init_dist(
    launcher: Literal["pytorch", "slurm"] = "pytorch",
    backend: str | None = None,
    init_backend: Literal["torch", "deepspeed"] = "torch",
    *,
    timeout: timedelta | None = None,
) -> None:
    """Take this process's device and join torch.distributed. Collective over all processes of the launcher.

    After `torch.distributed.destroy_process_group()` a process may join again, as all others do.

    Args:
        launcher: `pytorch` for torchrun, `slurm` for srun.
        backend: of torch.distributed; by default the one of this platform.
        init_backend: `deepspeed` tells DeepSpeed (the extra `deepspeed`) of the process group as well.
        timeout: of collectives; torch's own by default.

    Raises:
        ValueError: an unknown launcher or init backend, or variables of the launcher that are missing; or its port is
            taken.
        ImportError: DeepSpeed is asked for and not installed.
        RuntimeError: torch.distributed is initialised already.
    """
    if init_backend not in ("torch", "deepspeed"):
        raise UserError(f"init_backend must be torch or deepspeed, got {init_backend!r}")
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialised already: call destroy_process_group() before init_dist")
    if init_backend == "deepspeed":
        try:
            import deepspeed  # before anything is joined, in case it is not installed
        except ModuleNotFoundError as error:
            if error.name != "deepspeed":  # it is there, and misses something itself
                raise
            raise ImportError(
                "init_dist(init_backend='deepspeed') needs DeepSpeed: pip install 'roll[deepspeed]'",
                name="deepspeed",
            ) from error
    os.environ.update(rendezvous(launcher, dict(os.environ)))
    platform = get_platform()
    platform.use_device(int(os.environ["LOCAL_RANK"]))
    join(backend or platform.collective_backend, timeout)
    if init_backend == "deepspeed":
        deepspeed.init_distributed(dist_backend=backend or platform.collective_backend)


def rendezvous(launcher: str, environment: dict[str, str]) -> dict[str, str]:
    """`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` of a process with this environment.

    Under Slurm an address and a port that are set win. Without them the address is the job's first host and the port
    follows from the job's number, so that two jobs on one host have two ports.

    Raises:
        ValueError: the launcher is unknown, or did not set what it should.
    """
    names = {"pytorch": {name: name for name in SLURM_NAMES}, "slurm": SLURM_NAMES}.get(launcher)
    if names is None:
        raise UserError(f"launcher must be pytorch or slurm, got {launcher!r}")
    needed = [*names.values(), *(["MASTER_ADDR", "MASTER_PORT"] if launcher == "pytorch" else [])]
    derived = {"MASTER_ADDR": "SLURM_JOB_NODELIST", "MASTER_PORT": "SLURM_JOB_ID"} if launcher == "slurm" else {}
    needed += [theirs for name, theirs in derived.items() if not environment.get(name)]
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        command = "torchrun" if launcher == "pytorch" else "srun"
        raise UserError(f"init_dist({launcher!r}) found no {', '.join(missing)}: start the processes with {command}")
    found = {name: environment[theirs] for name, theirs in names.items()}
    # All ranks see the same list and the same number, so all of them find rank 0 on its first node.
    found["MASTER_ADDR"] = environment.get("MASTER_ADDR") or first_host(environment["SLURM_JOB_NODELIST"])
    found["MASTER_PORT"] = environment.get("MASTER_PORT") or port_of_job(environment["SLURM_JOB_ID"])
    return found


def port_of_job(number: str) -> str:
    """Port of a Slurm job; another one for each of the next 11999 jobs."""
    if not number.isdecimal():
        raise UserError(f"SLURM_JOB_ID must be a number, got {number!r}")
    return str(FIRST_PORT + int(number) % PORTS)


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form of a node list: `gpu[007-010,12]-ib,login` to `gpu007-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(f"no host in the node list {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())
