"""Parallel degrees and the arithmetic of ranks.

Pure Python: nothing here needs torch.distributed, so that a driver can dispatch to ranks it does not belong to,
and a test can check the layout of a thousand ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from roll.config import ParallelSettings
from roll.config.parallel import RANK_AXES
from roll.errors import UserError

DEFAULT_RANK_ORDER = "tp-cp-ep-dp-pp"
SplitOver = Literal["tp", "wp"]
"""Groups of ranks over which a weight can be split: tensor parallelism, and weight parallelism (mode isp)."""


@dataclass(frozen=True)
class RankCoordinates:
    """Place of one rank on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelDegrees:
    """Division of `world_size` ranks into tensor, context, data and pipeline parallel groups.

    `order` names the axes from the fastest varying to the slowest, as in Megatron-Core. Expert parallelism (`ep`) is
    always 1 here and has no influence on the layout. The sequence-parallel ranks of mode isp are the `cp` axis. Its
    weight-parallel groups are no axis: they are the ranks of a stage (cp x dp), `wp` at a time.

    Example: 8 ranks, tp 2, pp 2 (so dp 2) under `tp-cp-ep-pp-dp`: rank 5 is tp 1, pp 0, dp 1.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    wp: int = 1
    order: str = DEFAULT_RANK_ORDER

    def __post_init__(self) -> None:
        for axis in ("world_size", "tp", "pp", "cp", "wp"):
            if getattr(self, axis) < 1:
                raise UserError(f"{axis} must be at least 1, got {getattr(self, axis)}")
        if sorted(self.order.split("-")) != sorted(RANK_AXES):
            raise UserError(f"rank_order must name each of {'-'.join(RANK_AXES)} once, got {self.order!r}")
        if self.world_size % self.model_parallel_size:
            raise UserError(
                f"world_size {self.world_size} is not a multiple of tp {self.tp} x pp {self.pp} x cp {self.cp} "
                f"= {self.model_parallel_size}"
            )
        if self.cp * self.dp % self.wp:
            raise UserError(
                f"wp {self.wp} does not divide the {self.cp * self.dp} ranks of a stage (cp {self.cp} x dp {self.dp})"
            )

    @classmethod
    def of(cls, settings: ParallelSettings, world_size: int) -> ParallelDegrees:
        """The degrees that these settings give `world_size` ranks.

        Raises:
            ValueError: they do not fit.
        """
        if world_size % settings.model_parallel_size:
            given = f"{settings.describe()} = {settings.model_parallel_size}"
            raise UserError(f"world_size {world_size} is not a multiple of {given}")
        return cls(
            world_size,
            tp=settings.tp,
            pp=settings.pp,
            cp=settings.context_parallel,
            wp=settings.wp,
            order=settings.rank_order,
        )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and share one batch."""
        return self.tp * self.pp * self.cp

    @property
    def dp(self) -> int:
        return self.world_size // self.model_parallel_size

    @cached_property
    def _sizes(self) -> dict[str, int]:
        sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return {axis: sizes[axis] for axis in self.order.split("-")}

    def coordinates(self, rank: int) -> RankCoordinates:
        """The coordinates of a global rank. Raises ValueError outside `range(world_size)`."""
        if not 0 <= rank < self.world_size:
            raise UserError(f"rank {rank} is outside a world of {self.world_size} ranks")
        position, rest = {}, rank
        for axis, size in self._sizes.items():
            rest, position[axis] = divmod(rest, size)
        return RankCoordinates(tp=position["tp"], cp=position["cp"], dp=position["dp"], pp=position["pp"])

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The global rank at these coordinates."""
        at = {"tp": tp, "cp": cp, "ep": 0, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for axis, size in self._sizes.items():
            assert 0 <= at[axis] < size, f"{axis} {at[axis]} is outside its degree {size}"
            rank, stride = rank + at[axis] * stride, stride * size
        return rank

    def groups(self, axes: str) -> list[list[int]]:
        """All groups along one axis (`"tp"`) or several (`"tp-cp"`): ranks that differ only on these axes.

        Groups are ordered by their first rank, ranks within a group by number.
        """
        unknown = set(axes.split("-")) - set(RANK_AXES)
        if unknown:
            raise UserError(f"unknown axes {', '.join(sorted(unknown))}; they are {', '.join(RANK_AXES)}")
        inside = [axis for axis in self._sizes if axis in axes.split("-")]
        outside = [axis for axis in self._sizes if axis not in inside]
        groups = []
        for fixed in product(*(range(self._sizes[axis]) for axis in outside)):
            members = []
            for varying in product(*(range(self._sizes[axis]) for axis in inside)):
                at = dict(zip(outside, fixed, strict=True)) | dict(zip(inside, varying, strict=True))
                at.pop("ep")
                members.append(self.rank_at(**at))
            groups.append(sorted(members))
        assert prod((len(groups), len(groups[0]))) == self.world_size
        return sorted(groups)

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The group along `axes` that `rank` belongs to."""
        return next(group for group in self.groups(axes) if rank in group)

    def weight_mesh(self) -> list[list[list[int]]]:
        """`[stage][replica][wp]`: the ranks that share one copy of the weights stand together.

        Example: 8 ranks, pp 2, wp 2: `[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]`.
        """
        return [
            [stage[start : start + self.wp] for start in range(0, len(stage), self.wp)]
            for stage in self.groups("cp-dp")
        ]

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The rank that receives each data-parallel share (tp 0, cp 0, first stage), in data-parallel order."""
        return tuple(self.rank_at(dp=dp) for dp in range(self.dp))

    @cached_property
    def reporters(self) -> tuple[int, ...]:
        """The rank that returns each share's results (tp 0, cp 0, last stage), in data-parallel order."""
        return tuple(self.rank_at(dp=dp, pp=self.pp - 1) for dp in range(self.dp))
