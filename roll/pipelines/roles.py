"""The roles of a PPO run as clusters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config import PPOConfig
from roll.data.tokenizer import padding_id
from roll.parallel import ParallelDegrees
from roll.pipelines.prompt_data import PromptData
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
    reference: Cluster | None
    """None without a KL penalty."""
    rollout: Cluster
    reward: Cluster


def ranks_of_roles(config: PPOConfig) -> dict[str, int]:
    """How many ranks each role has; there is a reference only for a KL penalty."""
    models = ("actor", "critic", "reference", "rollout")
    ranks = {
        role: getattr(config, role).world_size for role in models if role != "reference" or config.ppo.kl.penalises
    }
    return ranks | {"reward": 1}


def worker_logs(config: PPOConfig) -> Path:
    """The folder of what the workers of a run print."""
    return (config.run_dir / "logs").absolute()


def place_roles(config: PPOConfig) -> Placement:
    """Reserve what the roles need; the ranks of the roles share devices."""
    layout = PlacementLayout(ranks_of_roles(config), device=get_platform().ray_resource, cpu_roles=("reward",))
    return Placement(layout, timeout_s=config.ray.placement_timeout_s)


def start_roles(config: PPOConfig, model: Path, data: PromptData, placement: Placement) -> Roles:
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
            log_dir=worker_logs(config),
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
        reference=start_model("reference", ReferenceWorker) if config.ppo.kl.penalises else None,
        rollout=start(
            "rollout",
            RolloutWorker,
            ParallelDegrees(config.rollout.world_size),
            settings=config.strategy_settings("rollout", model),
            rollout=config.rollout,
            end_token_ids=data.end_token_ids,
            pad_token_id=padding_id(data.tokenizer),
        ),
        reward=start(
            "reward",
            RewardWorker,
            ParallelDegrees(1),
            function=config.reward.function,
            tokenizer=model,
            end_token_ids=data.end_token_ids,
            trust_remote_code=config.trusts_remote_code,
        ),
    )
    models = (roles.actor, roles.critic, roles.reference, roles.rollout)
    loading = [cluster.submit("initialize") for cluster in models if cluster is not None]
    for pending in loading:
        pending.result()
    return roles
