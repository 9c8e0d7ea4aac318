"""The seam of an algorithm: its settings, the roles it needs, how it assigns credit, and the losses it trains with.

An algorithm is one file. It declares; `roll.pipelines.rl` runs it. The fields that a run can have, and which role makes
them, are listed in `roll.pipelines.data_flow`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_type_hints

from roll.config.loop import LoopSettings
from roll.config.problems import Check
from roll.config.settings import Settings
from roll.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from roll.algorithms.loss_term import LossTerm
    from roll.protocol import DataProto


class AlgorithmSettings(Settings):
    """Settings that every algorithm has. A role that only this algorithm has is a section here, under its name."""

    name: str
    """The algorithm: a file of `roll/algorithms`, or module:Name of a class of your own."""

    def checks_in(self, loop: LoopSettings) -> Iterable[Check]:
        """Checks between these settings and those of the loop. Paths of their problems begin at the whole config."""
        return ()


@dataclass(frozen=True)
class Credit:
    """Credit of a step's responses."""

    fields: Mapping[str, Tensor]
    """New fields of the batch, `[B, ...]`, that loss terms read."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are logged for the step, under names that the loop and the losses do not use."""
    kept: Tensor | None = None
    """`[B]` bool: the responses that are learned from; None: all. The others count in no normaliser."""


class Algorithm(ABC):
    """An algorithm of reinforcement learning. A subclass says with an annotation which settings are its own:

        class Reinforce(Algorithm):
            settings: ReinforceSettings
            reads = {"scores", "response_mask"}
            makes = {"advantages"}

    One object lives on the driver for the whole run.
    """

    settings: AlgorithmSettings

    def __init__(self, settings: AlgorithmSettings) -> None:
        self.settings = settings

    @property
    def roles(self) -> Set[str]:
        """Model roles that are needed beside the actor, which every run has: critic, reference."""
        return {"actor"}

    @property
    @abstractmethod
    def reads(self) -> Set[str]:
        """Fields of the batch that `credit` reads, which is given no others; loss terms declare their own."""

    @property
    @abstractmethod
    def makes(self) -> Set[str]:
        """Fields that `credit` adds."""

    @abstractmethod
    def credit(self, batch: DataProto) -> Credit:
        """Credit of the responses of a step, `[B, S]`, computed on the driver.

        Pure: `batch` is not changed, and two calls give the same.

        Raises ValueError for scores or answers of a model that are not finite.
        """

    @abstractmethod
    def losses(self) -> Mapping[str, Sequence[LossTerm]]:
        """The terms of the loss of each role that is trained, in the order in which the roles take a mini-batch.

        Asked for in every step, so that weights may adapt; roles and fields stay those of the first time.
        """

    def trains(self, role: str, step: int) -> bool:
        """Whether the role is trained in this step, counted from 1."""
        return True

    def observe(self, metrics: Mapping[str, float], responses: int) -> None:  # noqa: B027 (most have nothing to adapt)
        """Adapt to the metrics of `credit` of a step with this many responses."""

    @classmethod
    def settings_type(cls) -> type[AlgorithmSettings]:
        """The class of `settings`. Raises UserError if the annotation is no AlgorithmSettings."""
        owner = next(base for base in cls.__mro__ if "settings" in vars(base).get("__annotations__", {}))
        annotation = owner.__annotations__["settings"]
        # Alone: other attributes may have types that are imported for type checkers only.
        alone = type(cls.__name__, (), {"__annotations__": {"settings": annotation}, "__module__": owner.__module__})
        try:
            settings = get_type_hints(alone)["settings"]
        except NameError as error:
            text = f"{cls.__name__}.settings is annotated with {annotation!r}, which module {owner.__module__}"
            raise UserError(f"{text} does not have at run time: {error}") from error
        if not (isinstance(settings, type) and issubclass(settings, AlgorithmSettings)):
            raise UserError(f"{cls.__name__}.settings is annotated with {settings!r}, which is no AlgorithmSettings")
        return settings
