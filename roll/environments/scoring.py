"""A reward function that takes a batch, for episodes that each want one score."""

from __future__ import annotations

import asyncio

from roll.data.tasks import Entry, RewardError, RewardFunction, checked_rewards


class BatchedScores:
    """Calls a reward function once for all episodes that wait for a score, in the order in which they asked.

    The call is made when every episode that could run has run: those that are stepped together and ask at once share
    one call.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self._waiting: list[tuple[str, Entry, asyncio.Future[float]]] = []

    async def score(self, text: str, entry: Entry) -> float:
        """The score of one response. Raises RewardError as `checked_rewards` does, in every episode of the call."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._call)
        scored: asyncio.Future[float] = loop.create_future()
        self._waiting.append((text, entry, scored))
        return await scored

    def _call(self) -> None:
        waiting, self._waiting = self._waiting, []
        texts, entries = [text for text, _, _ in waiting], [entry for _, entry, _ in waiting]
        try:
            rewards = checked_rewards(self.function, texts, entries)
        except RewardError as error:
            for _, _, scored in waiting:
                if not scored.done():
                    scored.set_exception(error)
            return
        for reward, (_, _, scored) in zip(rewards, waiting, strict=True):
            if not scored.done():
                scored.set_result(reward)
