"""The sequence-parallel and data-parallel groups of this process.

The five interfaces take no group as an argument, so the groups stand here, in the only module of this package that
keeps anything between two calls. Everything else takes a group, or asks `sequence_group` for this one.

Ranks that stand next to each other share a sequence; ranks with the same place in their sequences share data. Of 8
ranks at size 4, ranks 0-3 and 4-7 are sequence-parallel groups; 0 and 4, 1 and 5, ... are data-parallel groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from roll.parallel.rendezvous import await_all
from roll.parallel.sequence.agreement import agree
from roll.platform import get_platform


@dataclass(frozen=True)
class SequenceParallelGroups:
    """This rank's groups, and all ranks as a mesh with the axes `data` and `sequence`."""

    sequence: ProcessGroup
    data: ProcessGroup
    mesh: DeviceMesh
    world: ProcessGroup
    """torch.distributed's default group, in which they were made and with which they end."""


_groups: SequenceParallelGroups | None = None
_destroyed_in: ProcessGroup | None = None
"""The default group in which `destroy_sequence_parallel` was called last, until the next init."""


def init_sequence_parallel(
    sequence_parallel_world_size: int = 1, *, timeout: timedelta | None = None
) -> SequenceParallelGroups:
    """Divide all ranks into groups of `sequence_parallel_world_size` that share a sequence. Collective over all ranks.

    A second call with the same size returns the groups that are there. `timeout` is that of the groups' collectives,
    torch's own by default.

    Raises:
        RuntimeError: torch.distributed is not initialised, or groups of another size exist.
        ValueError: the size does not divide the number of ranks, or is not the same on all of them.
    """
    global _groups, _destroyed_in
    if not dist.is_initialized():
        raise RuntimeError(
            "init_sequence_parallel needs torch.distributed: call init_dist (or init_process_group) first"
        )
    world, ranks = _world(), dist.get_world_size()
    assert world is not None
    existing = _groups if _groups is not None and _groups.world is world else None
    size = sequence_parallel_world_size
    problem = None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        problem = f"sequence_parallel_world_size must be a positive integer, got {size!r}"
    elif ranks % size:
        problem = f"sequence_parallel_world_size {size} does not divide the {ranks} ranks"
    agree(world, problem, sequence_parallel_world_size=size)
    if existing is not None:
        if existing.sequence.size() != size:
            raise RuntimeError(
                f"sequence parallelism of size {existing.sequence.size()} is initialised; "
                f"call destroy_sequence_parallel() before size {size}"
            )
        return existing
    layout = torch.arange(ranks).view(-1, size)
    sequence, _ = dist.new_subgroups_by_enumeration(layout.tolist(), timeout=timeout)
    data, _ = dist.new_subgroups_by_enumeration(layout.t().tolist(), timeout=timeout)
    await_all()
    mesh = DeviceMesh.from_group(
        [data, sequence], get_platform().name, mesh=layout.tolist(), mesh_dim_names=("data", "sequence")
    )
    _groups, _destroyed_in = SequenceParallelGroups(sequence, data, mesh, world), None
    return _groups


def destroy_sequence_parallel() -> None:
    """Destroy the groups. What asks for them afterwards raises RuntimeError, until the next init. Without groups,
    and when torch.distributed has been left already, there is nothing to do.
    """
    global _groups, _destroyed_in
    if _groups is not None and _groups.world is _world():
        dist.destroy_process_group(_groups.sequence)
        dist.destroy_process_group(_groups.data)
        _destroyed_in = _groups.world
    _groups = None


@contextmanager
def sequence_parallel_groups(
    sequence_parallel_world_size: int = 1, *, timeout: timedelta | None = None
) -> Iterator[SequenceParallelGroups]:
    """`init_sequence_parallel` for the length of a block."""
    groups = init_sequence_parallel(sequence_parallel_world_size, timeout=timeout)
    try:
        yield groups
    finally:
        destroy_sequence_parallel()


def is_sequence_parallel_initialized() -> bool:
    """Whether the groups exist. The only question that may be asked after the teardown."""
    return _groups is not None and _groups.world is _world()


def get_sequence_parallel_groups() -> SequenceParallelGroups:
    """Both groups and the mesh. Raises RuntimeError before init and after the teardown."""
    groups = _current()
    if groups is None:  # Not None as an answer: torch.distributed would take it for all ranks.
        raise RuntimeError("sequence parallelism is not initialised: call init_sequence_parallel first")
    return groups


def get_sequence_parallel_group() -> ProcessGroup:
    """The ranks that share this rank's sequence. Raises RuntimeError before init and after the teardown."""
    return get_sequence_parallel_groups().sequence


def get_sequence_parallel_mesh() -> DeviceMesh:
    """All ranks as (`data`, `sequence`). Raises RuntimeError before init and after the teardown."""
    return get_sequence_parallel_groups().mesh


def get_sequence_parallel_world_size() -> int:
    """Ranks per sequence; 1 before init, RuntimeError after the teardown."""
    groups = _current()
    return 1 if groups is None else groups.sequence.size()


def get_sequence_parallel_rank() -> int:
    """Which part of its sequence this rank has; 0 before init, RuntimeError after the teardown."""
    groups = _current()
    return 0 if groups is None else groups.sequence.rank()


def get_data_parallel_group() -> ProcessGroup:
    """The ranks with this rank's place in other sequences. Raises RuntimeError before init and after the teardown."""
    return get_sequence_parallel_groups().data


def get_data_parallel_world_size() -> int:
    """Sequences that are worked on at a time; before init every rank of torch.distributed has one of its own."""
    groups = _current()
    if groups is not None:
        return groups.data.size()
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    """Which of these sequences this rank has a part of."""
    groups = _current()
    if groups is not None:
        return groups.data.rank()
    return dist.get_rank() if dist.is_initialized() else 0


def sequence_group(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """`group` if it is given, else the group of this process; None before init, when a rank is alone.

    Raises:
        RuntimeError: `group` is None and the groups were destroyed.
    """
    if group is not None:
        return group
    groups = _current()
    return None if groups is None else groups.sequence


def _world() -> ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _current() -> SequenceParallelGroups | None:
    """The groups, None before init. Raises RuntimeError where they have been but are no more."""
    world = _world()
    if _groups is not None and _groups.world is not world:
        raise RuntimeError(
            "the sequence-parallel groups ended with torch.distributed: call init_sequence_parallel again"
        )
    if _destroyed_in is not None and _destroyed_in is world:
        raise RuntimeError("the sequence-parallel groups were destroyed: call init_sequence_parallel again")
    return _groups
