"""The roles of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roll.data.tokenizer import padding_id
from roll.generation.generator import ServedModel
from roll.generation.records import Sampling
from roll.parallel import ParallelDegrees
from roll.pipelines.prompt_data import PromptData
from roll.pipelines.rl_config import ModelRole, RLConfig
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
    critic: Critic | None
    """None for an algorithm without one."""
    reference: Reference | None
    """None for an algorithm that compares with none."""
    rollout: Rollout
    reward: Reward

    def trained(self, name: str) -> Actor | Critic:
        """The role of this name, which an algorithm trains."""
        role = {"actor": self.actor, "critic": self.critic}[name]
        assert role is not None, "check_data_flow refuses an algorithm that trains a role it does not name"
        return role


def ranks_of_roles(config: RLConfig) -> dict[str, int]:
    """Number of ranks of each role."""
    models = {role: config.model_role(role).world_size for role in config.model_roles}
    return models | {"rollout": config.rollout.world_size, "reward": 1}


def worker_logs(config: RLConfig) -> Path:
    """The folder of what the workers of a run print."""
    return (config.run_dir / "logs").absolute()


def served_model(config: RLConfig, folder: Path, pad_token_id: int) -> ServedModel:
    """The model in `folder`, as engines are told of it."""
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    vocab_size = config.architecture.vocab_size
    return ServedModel(folder, config.folder_family, config.dtype, longest, pad_token_id, vocab_size)


def place_roles(config: RLConfig) -> Placement:
    """Reserve what the roles need; the ranks of the roles share devices."""
    layout = PlacementLayout(ranks_of_roles(config), device=get_platform().ray_resource, cpu_roles=("reward",))
    return Placement(layout, timeout_s=config.ray.placement_timeout_s)


def start_roles(config: RLConfig, model: Path, data: PromptData, placement: Placement) -> Roles:
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

    def start_model(role_cls: type[R], name: ModelRole) -> R:
        settings = config.model_role(name)
        return start(
            role_cls,
            name,
            ParallelDegrees.of(settings.parallel, settings.world_size),
            settings=config.strategy_settings(name, model),
            timeout_s=config.process_group_timeout_s,
        )

    roles = Roles(
        actor=start_model(Actor, "actor"),
        critic=start_model(Critic, "critic") if "critic" in config.model_roles else None,
        reference=start_model(Reference, "reference") if "reference" in config.model_roles else None,
        rollout=start(
            Rollout,
            "rollout",
            ParallelDegrees(config.rollout.world_size),
            settings=config.rollout.engine,
            model=served_model(config, model, padding_id(data.tokenizer)),
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
