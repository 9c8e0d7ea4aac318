"""A reward function that takes a batch, for episodes that each want one score."""

from __future__ import annotations

import asyncio

from roll.data.tasks import Entry, RewardFunction, checked_rewards


class BatchedScores:
    """Calls a reward function once for all episodes that wait for a score, in the order in which they asked.

    The call is made when every episode that could run has run: those that are stepped together and ask at once share
    one call.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self._waiting: list[tuple[str, Entry]] = []
        self._call: asyncio.Task[list[float]]

    async def score(self, text: str, entry: Entry) -> float:
        """The score of one response. Raises RewardError as `checked_rewards` does, in every episode of the call."""
        if not self._waiting:
            self._call = asyncio.create_task(self._scores())
        call, place = self._call, len(self._waiting)
        self._waiting.append((text, entry))
        # An episode that gives up waiting must not end the call for the others.
        return (await asyncio.shield(call))[place]

    async def _scores(self) -> list[float]:
        waiting, self._waiting = self._waiting, []
        return checked_rewards(self.function, [text for text, _ in waiting], [entry for _, entry in waiting])
