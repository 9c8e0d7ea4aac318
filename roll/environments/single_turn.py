"""One response to a prompt, scored by the run's reward function."""

from __future__ import annotations

from roll.environments.environment import Environment, Outcome, Turn
from roll.generation.records import Response


class SingleTurn(Environment):
    """A task of one turn."""

    async def reset(self) -> Turn:
        return Turn(self.given.prompt_ids)

    async def step(self, response: Response) -> Outcome:
        return Outcome(await self.given.score(response.text))


ENVIRONMENT = SingleTurn
