"""The interface of an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from roll.data.tasks import Entry
from roll.generation.records import Response


@dataclass(frozen=True)
class Given:
    """The parts that an environment is made from."""

    prompt_ids: tuple[int, ...]
    """The task's prompt as token ids."""
    entry: Entry
    """The entry of the task's data set."""
    encode: Callable[[str], list[int]]
    """Token ids of a text, without special tokens at its ends."""
    score: Callable[[str], Awaitable[float]]
    """The run's `reward.function` for a response's text and this entry: `await self.given.score(text)`. All
    episodes that wait for it are scored by one call of the function."""


@dataclass(frozen=True)
class Turn:
    """Tokens that the environment appends to the row; the engine goes on behind them."""

    token_ids: Sequence[int]
    learned: bool = False
    """Whether these tokens are learned from, as the engine's own are. Those of `reset` never are."""


@dataclass(frozen=True)
class Outcome:
    """The end of an episode."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers worth logging; a run logs their means over its episodes as `episode/NAME`. The name `full` is refused:
    the run reports it."""


class Environment(ABC):
    """One episode."""

    def __init__(self, given: Given) -> None:
        self.given = given

    @abstractmethod
    async def reset(self) -> Turn:
        """The tokens that the episode begins with, at most `task.max_prompt_tokens`."""

    @abstractmethod
    async def step(self, response: Response) -> Turn | Outcome:
        """The answer to a response: more tokens, or the end.

        Args:
            response: the engine's tokens with the reason why they stopped, and their text.
        """

    async def full(self) -> Outcome:
        """The end of an episode that wanted to go on, where the row has no room for another response."""
        return Outcome(0.0)
