"""How a role's ranks are divided: the degrees that a user sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import PositiveInt

from roll.config.problems import Check, Problem
from roll.config.settings import Settings

RANK_AXES = ("tp", "cp", "ep", "dp", "pp")


class ParallelSettings(Settings):
    """Parallel degrees. The data-parallel degree is what the world size leaves: world_size / (tp * pp * cp)."""

    tp: PositiveInt = 1
    """Tensor-parallel degree: ranks over which each layer's weights are split."""
    pp: PositiveInt = 1
    """Pipeline-parallel degree: stages over which the layers are split."""
    cp: PositiveInt = 1
    """Context-parallel degree: ranks over which a sequence is split (only 1 for now)."""
    sequence_parallel: bool = False
    """Whether activations between attention and MLP are split over the tensor-parallel ranks; needs tp > 1."""
    rank_order: str = "tp-cp-ep-dp-pp"
    """The axes from the fastest varying to the slowest: the order in which ranks are laid out."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model and share one batch."""
        return self.tp * self.pp * self.cp

    def checks(self) -> Iterable[Check]:
        return (self._rank_order_is_complete, self._sequence_parallel_has_ranks)

    def _rank_order_is_complete(self) -> Iterator[Problem]:
        if sorted(self.rank_order.split("-")) != sorted(RANK_AXES):
            yield Problem("rank_order", f"must name each of {', '.join(RANK_AXES)} once, got {self.rank_order!r}")

    def _sequence_parallel_has_ranks(self) -> Iterator[Problem]:
        if self.sequence_parallel and self.tp == 1:
            yield Problem("sequence_parallel", "true needs tp > 1 (its ranks share the sequence), got tp 1")
