"""An environment as a user would bring one: it asks again until the answer is right, at most three times."""

from roll.environments.environment import Environment, Outcome, Turn
from roll.generation.records import Response


class Asking(Environment):
    async def reset(self) -> Turn:
        self.asked = 1
        return Turn(self.given.prompt_ids)

    async def step(self, response: Response) -> Turn | Outcome:
        reward = await self.given.score(response.text)
        if reward == 1 or self.asked == 3:
            return Outcome(reward / self.asked, {"asked": self.asked})
        self.asked += 1
        return Turn(self.given.encode("no "))

    async def full(self) -> Outcome:
        return Outcome(0.0, {"asked": self.asked})
