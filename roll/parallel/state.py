"""The process groups of one rank.

This is the only module that creates, reads or destroys Megatron-Core's global groups (`megatron.core.parallel_state`).
Everybody else is given a `ParallelState` and passes its groups on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from roll.config import Mode, ParallelSettings
from roll.errors import UserError
from roll.parallel.degrees import ParallelDegrees, RankCoordinates, SplitOver
from roll.parallel.rendezvous import await_all, join
from roll.platform import get_platform

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


_joined_here = False
"""Whether `init_parallel` joined torch.distributed in this process; a caller that joined it leaves it."""


@dataclass(frozen=True)
class ParallelState:
    """Degrees, this rank's coordinates and its groups.

    `megatron` is what Megatron-Core's layers, schedules and optimizers take as `pg_collection`.
    """

    mode: Mode
    degrees: ParallelDegrees
    rank: int
    megatron: ProcessGroupCollection
    weight_mesh: DeviceMesh | None
    """Of mode isp: this stage's ranks as `(replica, wp)`; None in the other modes."""

    @property
    def at(self) -> RankCoordinates:
        return self.degrees.coordinates(self.rank)

    @property
    def tp(self) -> ProcessGroup:
        return self.megatron.tp

    @property
    def pp(self) -> ProcessGroup:
        return self.megatron.pp

    @property
    def dp(self) -> ProcessGroup:
        return self.megatron.dp

    @property
    def tp_cp(self) -> ProcessGroup:
        """The ranks of one stage that work on the same share: tensor x context."""
        return self.megatron.tp_cp

    @property
    def cp(self) -> ProcessGroup:
        """The ranks over which a sequence is split from the embedding to the head (sp of mode isp)."""
        return self.megatron.cp

    @property
    def weights(self) -> ProcessGroup:
        """The ranks over which weights are split, each of them holding an equal part: tp, or wp of mode isp."""
        return self.split_group("tp" if self.weight_mesh is None else "wp")

    def split_group(self, over: SplitOver) -> ProcessGroup:
        """The ranks that hold the parts of a weight which is split over `over`."""
        if over == "tp":
            return self.tp
        assert self.weight_mesh is not None, "weights are split over wp in mode isp only"
        return self.weight_mesh.get_group("wp")

    def split_replica(self, over: SplitOver) -> int:
        """The number, from 0, of this rank's copy among the equal copies of a weight that is split over `over`."""
        if over == "tp":
            return self.megatron.dp_cp.rank()
        assert self.weight_mesh is not None, "weights are split over wp in mode isp only"
        return self.weight_mesh.get_local_rank("replica")

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.degrees.pp - 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank receives its share of the data first."""
        return self.rank in self.degrees.leaders

    @property
    def is_reporter(self) -> bool:
        """Whether this rank returns its share's results."""
        return self.rank in self.degrees.reporters


def init_parallel(settings: ParallelSettings, *, timeout_s: float = 600.0) -> ParallelState:
    """Join torch.distributed (unless the caller has) and create every group.

    Rank, world size and rendezvous come from the environment, as torchrun and our workers set it (`RANK`,
    `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `LOCAL_RANK`).

    Raises:
        ValueError: the degrees do not fit the world, on every rank alike and before any group is made; variables of the
            launcher are missing, or its port is taken.
        RuntimeError: groups exist already in this process.
    """
    platform = get_platform()
    platform.bind(int(os.environ.get("LOCAL_RANK", "0")))
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection

    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    degrees = ParallelDegrees.of(settings, world_size)
    if mpu.model_parallel_is_initialized():
        raise RuntimeError("parallel groups exist already in this process; call destroy_parallel() first")
    global _joined_here
    if not dist.is_initialized():
        _join(timedelta(seconds=timeout_s))
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        context_parallel_size=degrees.cp,
        order=degrees.order,
        distributed_timeout_minutes=timeout_s / 60,  # It becomes a timedelta, which takes parts of minutes.
        create_gloo_process_groups=platform.collective_backend != "gloo",
    )
    _fill_rng_tracker()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    weight_mesh = _weight_mesh(degrees, timeout_s) if settings.mode == "isp" else None
    await_all()
    return ParallelState(settings.mode, degrees, dist.get_rank(), groups, weight_mesh)


def destroy_parallel() -> None:
    """Destroy Megatron-Core's groups, and leave torch.distributed if `init_parallel` joined it."""
    from megatron.core import parallel_state as mpu

    global _joined_here
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if _joined_here and dist.is_initialized():
        dist.destroy_process_group()
    _joined_here = False


@contextmanager
def parallel_groups(settings: ParallelSettings, *, timeout_s: float = 600.0) -> Iterator[ParallelState]:
    """`init_parallel` for the length of a block."""
    state = init_parallel(settings, timeout_s=timeout_s)
    try:
        yield state
    finally:
        destroy_parallel()


def _join(timeout: timedelta) -> None:
    """Join torch.distributed as the environment says. Raises ValueError if it lacks a variable (see `join` too)."""
    global _joined_here
    if "WORLD_SIZE" not in os.environ:  # One process without a launcher is a world of its own.
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start the ranks with torchrun")
    join(get_platform().collective_backend, timeout)
    _joined_here = True


def _weight_mesh(degrees: ParallelDegrees, timeout_s: float) -> DeviceMesh:
    """This stage's `(replica, wp)`. Collective over all ranks: every stage's groups are made by all."""
    stages = degrees.weight_mesh()
    timeout = timedelta(seconds=timeout_s)
    copies = [copy for stage in stages for copy in stage]
    replicas = [list(ranks) for stage in stages for ranks in zip(*stage, strict=True)]
    groups = [dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0] for ranks in (replicas, copies)]
    own_stage = next(stage for stage in stages if any(dist.get_rank() in copy for copy in stage))
    return DeviceMesh.from_group(groups, get_platform().name, mesh=own_stage, mesh_dim_names=("replica", "wp"))


def _fill_rng_tracker() -> None:
    """Give Megatron-Core's tracker its states: under sequence parallelism the layers ask for them, though our models
    draw no random numbers (transformer_block.py:733). The caller's own generators stay as they are.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    platform = get_platform()
    before = platform.rng_state()
    model_parallel_cuda_manual_seed(0)
    platform.set_rng_state(before)
