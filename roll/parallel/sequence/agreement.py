"""Errors that reach every rank: what one rank cannot go on with, its peers would otherwise wait for."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from roll.errors import UserError


def agree(group: ProcessGroup | None, problem: str | None = None, **facts: object) -> None:
    """Raise on all ranks of `group` alike if one of them has a problem, or if a fact is not the same on all of them.

    Facts are small and picklable. None for `group` is this rank alone. One exchange of objects: for once per step,
    not once per layer.

    Raises:
        ValueError: with the problem of the first rank that has one, or with the values that differ.
    """
    if group is None or group.size() == 1:
        if problem is not None:
            raise UserError(problem)
        return
    everyone: list[tuple[str | None, dict[str, object]]] = [(None, {})] * group.size()
    dist.all_gather_object(everyone, (problem, facts), group=group)
    problems = [other for other, _ in everyone]
    found = [rank for rank, other in enumerate(problems) if other is not None]
    if found:
        everywhere = len(found) == len(problems) and len(set(problems)) == 1
        raise UserError(problems[0] if everywhere else f"rank {found[0]} of the group: {problems[found[0]]}")
    for name in facts:
        values = [others.get(name) for _, others in everyone]
        if any(value != values[0] for value in values):
            raise UserError(f"{name} differs between the ranks of the group: {', '.join(map(repr, values))}")
