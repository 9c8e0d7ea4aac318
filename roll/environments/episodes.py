"""The episodes of one process: its environments are made, asked and thrown away, and what they give is checked."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from roll.data.tasks import Entry, RewardError, checked_reward, exact_match
from roll.environments.environment import Environment, Given, Outcome, Turn
from roll.environments.scoring import BatchedScores
from roll.errors import UserError
from roll.generation.records import Response

T = TypeVar("T")

FULL = "full"
"""Name of a run's metric: the share of episodes whose row was full before the environment gave an outcome."""


class EnvironmentFailed(UserError):
    """A user's environment raised, or gave something that is no turn and no outcome."""


@dataclass(frozen=True)
class Finished:
    """The rest of an episode that has ended."""

    reward: float
    metrics: Mapping[str, float]
    text: str
    """All that was appended to the prompt, without special tokens and without end tokens of responses."""
    exact: float
    """`exact_match` of the last response."""


@dataclass
class _Episode:
    environment: Environment
    entry: Entry
    texts: list[str] = field(default_factory=list)
    last: str = ""


class Episodes:
    """Makes environments of one class, one for each row, and runs all of them side by side.

    Args:
        name: of the class, for messages.
        vocab_size: of the model; a turn may have no other tokens.
    """

    def __init__(
        self,
        made_by: Callable[[Given], Environment],
        name: str,
        scores: BatchedScores,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self._made_by, self._name, self._scores, self._tokenizer = made_by, name, scores, tokenizer
        self._end_token_ids, self._vocab_size = frozenset(end_token_ids), vocab_size
        self._open: dict[int, _Episode] = {}

    async def begin(self, prompts: Sequence[Sequence[int]], entries: Sequence[Entry]) -> list[Turn]:
        """Begin an episode for each prompt; the tokens that each begins with. Raises as `step` does."""
        given = [
            Given(tuple(prompt), entry, self._encode, partial(self._scores.score, entry=entry))
            for prompt, entry in zip(prompts, entries, strict=True)
        ]
        self._open = {}
        return await _all(self._reset(row, each) for row, each in enumerate(given))

    async def step(self, responses: Sequence[Response]) -> list[Turn | Finished]:
        """The answers to responses, whose `row` is the place of their prompt in `begin`.

        Raises EnvironmentFailed, which names the row, for an environment that raises, or gives something that is
        neither a turn nor an outcome with finite numbers; RewardError for the run's reward function.
        """
        return await _all(map(self._step, responses))

    async def end_full(self, rows: Sequence[int]) -> list[Finished]:
        """End the episodes of rows that have no room for another response. Raises as `step` does."""
        return await _all(map(self._end_full, rows))

    async def _reset(self, row: int, given: Given) -> Turn:
        async def made_and_reset() -> object:
            self._open[row] = _Episode(self._made_by(given), given.entry)
            return await self._open[row].environment.reset()

        turn = self._turn(row, "reset", await self._asked(row, "reset", made_and_reset))
        if turn.learned:
            raise self._failed(row, "reset gave a turn that is learned from: the prompt never is")
        return turn

    async def _step(self, response: Response) -> Turn | Finished:
        row, episode = response.row, self._open[response.row]
        episode.last = self._decode(response)
        episode.texts.append(episode.last)
        answer = await self._asked(row, "step", partial(episode.environment.step, replace(response, text=episode.last)))
        if isinstance(answer, Outcome):
            return self._finished(row, "step", answer)
        turn = self._turn(row, "step", answer)
        episode.texts.append(self._tokenizer.decode(list(turn.token_ids), skip_special_tokens=True))
        return turn

    async def _end_full(self, row: int) -> Finished:
        outcome = await self._asked(row, "full", self._open[row].environment.full)
        if not isinstance(outcome, Outcome):
            raise self._failed(row, f"full gave a {type(outcome).__name__}, not an Outcome")
        self._open[row].texts.pop()  # The turn that the row has no room for.
        return self._finished(row, "full", outcome)

    async def _asked(self, row: int, method: str, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await ask()
        except RewardError:
            raise
        # The environment is the user's: whatever it raises is reported under its name. SystemExit would end the loop
        # that runs all episodes, and CancelledError would look like the end of the call.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise self._failed(row, f"{method} raised {type(error).__name__}: {error}") from error

    def _failed(self, row: int, what: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment {self._name}, row {row}: {what}")

    def _turn(self, row: int, method: str, turn: object) -> Turn:
        if not isinstance(turn, Turn):
            raise self._failed(
                row, f"{method} gave a {type(turn).__name__}, not a Turn{' or an Outcome' * (method == 'step')}"
            )
        try:
            ids = tuple(operator.index(token) for token in turn.token_ids)
        except TypeError as error:
            raise self._failed(row, f"{method} gave tokens that are not integers: {error}") from error
        if not ids or not all(0 <= token < self._vocab_size for token in ids):
            wanted = f"at least one token, and all from 0 to {self._vocab_size - 1}"
            raise self._failed(row, f"{method} gave tokens {list(ids)}, wanted are {wanted}")
        return Turn(ids, bool(turn.learned))

    def _finished(self, row: int, method: str, outcome: Outcome) -> Finished:
        if not isinstance(outcome.metrics, Mapping):
            raise self._failed(row, f"{method} gave metrics {outcome.metrics!r}, not a mapping of names to numbers")
        try:
            reward = checked_reward(outcome.reward, f"{method} gave the reward")
            metrics = {
                name: checked_reward(value, f"{method} gave {name!r}") for name, value in outcome.metrics.items()
            }
        except RewardError as error:
            raise self._failed(row, str(error)) from error
        if FULL in metrics:
            raise self._failed(row, f"{method} gave a metric named {FULL!r}, which the run itself reports")
        episode = self._open.pop(row)
        (exact,) = exact_match([episode.last], [episode.entry])
        return Finished(reward, metrics, "".join(episode.texts), exact)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, response: Response) -> str:
        """The text without the end token, which need not be a special token of the tokenizer."""
        ids = list(response.token_ids)
        if ids and ids[-1] in self._end_token_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=True)


async def _all(episodes: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all of them. Raises the first failure, once all have ended: none goes on behind an error."""
    results: list[T] = []
    for result in await asyncio.gather(*episodes, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
