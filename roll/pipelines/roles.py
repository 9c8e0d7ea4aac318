"""The roles of a PPO run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from roll.config import PPOConfig
from roll.data.tokenizer import padding_id
from roll.generation.generator import ServedModel
from roll.generation.records import Sampling
from roll.parallel import ParallelDegrees
from roll.pipelines.prompt_data import PromptData
from roll.platform import get_platform
from roll.protocol import ROW_DELIVERIES
from roll.workers import Placement, PlacementLayout, Role
from roll.workers.model_roles import Actor, Critic, Reference
from roll.workers.reward import Reward
from roll.workers.rollout import Rollout

R = TypeVar("R", bound=Role)


@dataclass(frozen=True)
class Roles:
    """The roles of a run."""

    actor: Actor
    critic: Critic
    reference: Reference | None
    """None without a KL penalty."""
    rollout: Rollout
    reward: Reward


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

    def start(role_cls: type[R], name: str, degrees: ParallelDegrees, **worker_kwargs: Any) -> R:
        return role_cls(
            role=name,
            degrees=degrees,
            placement=placement,
            worker_kwargs=worker_kwargs,
            call_timeout_s=config.ray.call_timeout_s,
            start_timeout_s=config.ray.start_timeout_s,
            delivery=ROW_DELIVERIES[config.ray.delivery],
            log_dir=worker_logs(config),
        )

    def start_model(role_cls: type[R], name: Literal["actor", "critic", "reference"]) -> R:
        settings = getattr(config, name)
        return start(
            role_cls,
            name,
            ParallelDegrees.of(settings.parallel, settings.world_size),
            settings=config.strategy_settings(name, model),
            timeout_s=config.process_group_timeout_s,
        )

    roles = Roles(
        actor=start_model(Actor, "actor"),
        critic=start_model(Critic, "critic"),
        reference=start_model(Reference, "reference") if config.ppo.kl.penalises else None,
        rollout=start(
            Rollout,
            "rollout",
            ParallelDegrees(config.rollout.world_size),
            settings=config.rollout.engine,
            model=ServedModel(
                folder=model,
                family=config.folder_family,
                dtype=config.dtype,
                max_tokens=config.task.max_prompt_tokens + config.rollout.max_new_tokens,
                pad_token_id=padding_id(data.tokenizer),
            ),
            sampling=Sampling(config.rollout.max_new_tokens, config.temperature, data.end_token_ids),
        ),
        reward=start(
            Reward,
            "reward",
            ParallelDegrees(1),
            settings=config.reward,
            tokenizer=model,
            end_token_ids=data.end_token_ids,
            vocab_size=config.architecture.vocab_size,
            trust_remote_code=config.trusts_remote_code,
        ),
    )
    models = (roles.actor, roles.critic, roles.reference, roles.rollout)
    loading = [role.initialize.submit() for role in models if role is not None]
    for pending in loading:
        pending.result()
    return roles
