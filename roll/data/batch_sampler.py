"""Assignment of packs to data-parallel ranks at each step: pure arithmetic on a place in the stream, no list of packs.

A step takes the next `micro_num * dp_size` packs of the epoch, `micro_num` of them for each rank in turn. Every rank
has the same number of steps and the same number of packs in each, whatever remains at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from roll.errors import UserError


@dataclass(frozen=True)
class Position:
    """A place in the stream, the same on all ranks: what comes next."""

    epoch: int = 0
    pack: int = 0
    """Packs of the epoch that are behind, on all ranks together."""
    step: int = 0
    """Steps that are behind, in all epochs; the ramp-up counts them."""

    def state_dict(self) -> dict[str, int]:
        """Its numbers, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RampUp:
    """A batch size that grows: `start` packs per rank, `increment` more after each `every` steps, up to `micro_num`.

    Example: `RampUp(start=1, increment=2, every=10)` with micro_num 4 gives 1 for ten steps, 3 for ten, then 4.
    """

    start: int
    increment: int
    every: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise UserError(f"ramp_up.{name} must be at least 1, got {value}")


class PackAddress(NamedTuple):
    """A pack of an epoch, or None for a pack of padding only."""

    epoch: int
    pack: int | None


class PackBatchSampler:
    """The steps of one data-parallel rank.

    At the end of an epoch fewer packs than a step needs may remain. With `drop_last` they are left out; otherwise the
    step is filled with packs of padding, which have nothing to learn, so every pack is seen exactly once per epoch.

    Another `dp_size` or `micro_num` may continue from the same position: it is a place in the stream of all ranks.

    Example, 5 packs, micro_num 1, dp_size 2: rank 0 takes 0, 2, 4 and rank 1 takes 1, 3, padding; with `drop_last`
    0, 2 and 1, 3.
    """

    def __init__(
        self,
        num_packs: int,
        *,
        micro_num: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        ramp_up: RampUp | None = None,
        drop_last: bool = False,
        epochs: int | None = None,
    ) -> None:
        """Take steps over `num_packs` packs per epoch, for `epochs` epochs (None: without end).

        Raises ValueError for a setting out of range, and if `drop_last` would leave out everything.
        """
        sizes = {"num_packs": num_packs, "micro_num": micro_num, "dp_size": dp_size, "epochs": epochs}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not 0 <= dp_rank < dp_size:
            raise UserError(f"dp_rank={dp_rank} is not one of dp_size={dp_size} ranks")
        if ramp_up is not None and ramp_up.start > micro_num:
            raise UserError(f"ramp_up.start={ramp_up.start} is over micro_num={micro_num}")
        if drop_last and num_packs < micro_num * dp_size:
            raise UserError(
                f"the dataset has {num_packs} packs, fewer than the {micro_num * dp_size} of one step "
                f"(micro_num={micro_num} * dp_size={dp_size}), and drop_last is set"
            )
        self.num_packs = num_packs
        self.micro_num = micro_num
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.ramp_up = ramp_up
        self.drop_last = drop_last
        self.epochs = epochs

    def micro_num_at(self, step: int) -> int:
        """Packs per rank at a step."""
        if self.ramp_up is None:
            return self.micro_num
        return min(self.micro_num, self.ramp_up.start + self.ramp_up.increment * (step // self.ramp_up.every))

    def step(self, position: Position) -> tuple[list[PackAddress], Position] | None:
        """This rank's packs of the step at `position`, and the position after it; None after the last epoch."""
        micro_num = self.micro_num_at(position.step)
        epoch, start = position.epoch, position.pack
        needed = micro_num * self.dp_size if self.drop_last else 1
        if start + needed > self.num_packs:
            epoch, start = epoch + 1, 0
        if self.epochs is not None and epoch >= self.epochs:
            return None
        mine = start + micro_num * self.dp_rank
        packs = [PackAddress(epoch, pack if pack < self.num_packs else None) for pack in range(mine, mine + micro_num)]
        stop = min(start + micro_num * self.dp_size, self.num_packs)
        return packs, Position(epoch, stop, position.step + 1)

    def steps(self, position: Position) -> Iterator[tuple[list[PackAddress], Position]]:
        """The steps from `position` on: this rank's packs of each, and the position after it."""
        while (found := self.step(position)) is not None:
            yield found
            position = found[1]

    def remaining_steps(self, position: Position) -> int | None:
        """Steps from `position` to the end of the last epoch; None without an end."""
        return None if self.epochs is None else sum(1 for _ in self.steps(position))
