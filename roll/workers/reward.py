"""The role that runs environments: it answers responses, and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roll.config import RewardSettings, expand_path
from roll.data.tasks import Entry, load_reward_function
from roll.data.tokenizer_folder import load_tokenizer
from roll.environments.environment import Turn
from roll.environments.episodes import Episodes, Finished
from roll.environments.registry import find_environment
from roll.environments.scoring import BatchedScores
from roll.generation.records import Response
from roll.workers.dispatch import Dispatch
from roll.workers.method import register
from roll.workers.role import Role
from roll.workers.worker import Worker


class RewardWorker(Worker):
    """Holds the open episodes of a run, and makes text for them. Its methods are those of `Episodes`."""

    def __init__(
        self,
        *,
        settings: RewardSettings,
        tokenizer: str | Path,
        end_token_ids: Sequence[int],
        vocab_size: int,
        trust_remote_code: bool = False,
        **rank: Any,
    ) -> None:
        super().__init__(**rank)
        self.episodes = Episodes(
            find_environment(settings.environment),
            settings.environment,
            BatchedScores(load_reward_function(settings.function)),
            load_tokenizer(expand_path(tokenizer), trust_remote_code=trust_remote_code),
            end_token_ids,
            vocab_size,
        )

    @register(Dispatch.RANK_ZERO)
    async def begin(self, prompts: Sequence[Sequence[int]], entries: Sequence[Entry]) -> list[Turn]:
        """Begin an episode for each prompt; the tokens that each begins with."""
        return await self.episodes.begin(prompts, entries)

    @register(Dispatch.RANK_ZERO)
    async def step(self, responses: Sequence[Response]) -> list[Turn | Finished]:
        """The answers of the environments to responses."""
        return await self.episodes.step(responses)

    @register(Dispatch.RANK_ZERO)
    async def end_full(self, rows: Sequence[int]) -> list[Finished]:
        """End the episodes of rows that have no room for another response."""
        return await self.episodes.end_full(rows)


class Reward(Role, RewardWorker):
    """All ranks that run environments."""
