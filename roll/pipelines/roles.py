"""The roles of a PPO run as clusters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.config import PPOConfig
from roll.data.tokenizer import padding_id
from roll.parallel import ParallelDegrees
from roll.platform import get_platform
from roll.workers import Cluster, Placement, PlacementLayout, Worker
from roll.workers.model_roles import ActorWorker, CriticWorker, ReferenceWorker
from roll.workers.reward import RewardWorker
from roll.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Roles:
    """One cluster for each role."""

    actor: Cluster
    critic: Cluster
    reference: Cluster
    rollout: Cluster
    reward: Cluster


def ranks_of_roles(config: PPOConfig) -> dict[str, int]:
    """How many ranks each role has."""
    ranks = {role: getattr(config, role).world_size for role in ("actor", "critic", "reference", "rollout")}
    return ranks | {"reward": 1}


def place_roles(config: PPOConfig) -> Placement:
    """Reserve what the roles need; the ranks of the roles share devices."""
    layout = PlacementLayout(ranks_of_roles(config), device=get_platform().ray_resource, cpu_roles=("reward",))
    return Placement(layout, timeout_s=config.ray.placement_timeout_s)


def start_roles(config: PPOConfig, model: Path, tokenizer: PreTrainedTokenizerBase, placement: Placement) -> Roles:
    """Start all roles side by side and load their models."""

    def start(role: str, worker: type[Worker], degrees: ParallelDegrees, **worker_kwargs: Any) -> Cluster:
        return Cluster(
            worker,
            role=role,
            degrees=degrees,
            placement=placement,
            worker_kwargs=worker_kwargs,
            call_timeout_s=config.ray.call_timeout_s,
            start_timeout_s=config.ray.start_timeout_s,
            rows_on=config.rows_on,
        )

    def start_model(role: Any, worker: type[Worker]) -> Cluster:
        settings = getattr(config, role)
        return start(
            role,
            worker,
            ParallelDegrees.of(settings.parallel, settings.world_size),
            settings=config.strategy_settings(role, model),
            timeout_s=config.process_group_timeout_s,
        )

    roles = Roles(
        actor=start_model("actor", ActorWorker),
        critic=start_model("critic", CriticWorker),
        reference=start_model("reference", ReferenceWorker),
        rollout=start(
            "rollout",
            RolloutWorker,
            ParallelDegrees(config.rollout.world_size),
            settings=config.strategy_settings("rollout", model),
            rollout=config.rollout,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=padding_id(tokenizer),
        ),
        reward=start(
            "reward",
            RewardWorker,
            ParallelDegrees(1),
            function=config.reward.function,
            tokenizer=model,
            trust_remote_code=config.trusts_remote_code,
        ),
    )
    loading = [cluster.submit("initialize") for cluster in (roles.actor, roles.critic, roles.reference, roles.rollout)]
    for pending in loading:
        pending.result()
    return roles
