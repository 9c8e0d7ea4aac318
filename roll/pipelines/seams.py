"""Checks of what a user may bring for a rollout, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config import Problem, RewardSettings, RolloutSettings
from roll.environments.registry import find_environment
from roll.errors import UserError
from roll.generation.registry import find_engine


def seam_problems(rollout: RolloutSettings, reward: RewardSettings) -> Iterator[Problem]:
    """Problems with the engine and the environment that these sections name."""
    name = rollout.engine.name
    if rollout.sleep_while_training and not find_engine(name).sleeps():
        yield Problem("rollout.sleep_while_training", f"must be false: engine {name!r} cannot sleep")
    try:
        find_environment(reward.environment)
    except UserError as error:
        yield Problem("reward.environment", f"{error}, got {reward.environment!r}")
