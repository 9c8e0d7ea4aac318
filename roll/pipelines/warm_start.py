"""The short supervised phase that makes a small model from nothing, so that PPO has a policy to improve.

It uses the actor's own strategy, with cross-entropy on the task's answers. The result is kept, under a name that
depends on every setting that shaped it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track

from roll.config import PPOConfig, Role
from roll.data.micro_batches import with_plan
from roll.data.prompts import PromptSampler
from roll.parallel import ParallelDegrees
from roll.pipelines.prompt_data import PromptData, write_untrained_model
from roll.platform import get_platform
from roll.workers import Cluster, Placement, PlacementLayout
from roll.workers.model_roles import ActorWorker

ROLE: Role = "warm_start"


def model_folder(config: PPOConfig, data: PromptData, console: Console) -> Path:
    """The folder of the model that the run starts from: `model.path`, or the warm start's, made now if need be.

    Ray must be running.
    """
    if config.model.path is not None:
        return config.model.path
    folder = config.output_dir / f"warm_start-{_fingerprint(config)}"
    if folder.is_dir():
        console.print(f"warm start: using {folder}")
    else:
        console.print(f"warm start: making {folder}")
        _train(config, data, folder, console)
    return folder


def _fingerprint(config: PPOConfig) -> str:
    """Ten hex digits over what the warm start depends on."""
    parts = config.model_dump(mode="json", include={"seed", "dtype", "model", "task", "warm_start"})
    parts["max_new_tokens"] = config.rollout.max_new_tokens
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def _train(config: PPOConfig, data: PromptData, folder: Path, console: Console) -> None:
    settings = config.warm_start
    batch = data.supervised
    assert settings is not None and config.model.config is not None and batch is not None  # The config's own checks.
    degrees = ParallelDegrees.of(settings.parallel, settings.world_size)
    sampler = PromptSampler(len(batch), settings.batch_size, config.seed)
    layout = PlacementLayout({ROLE: settings.world_size}, device=get_platform().ray_resource)
    wait = config.ray.placement_timeout_s
    with tempfile.TemporaryDirectory() as untrained, Placement(layout, timeout_s=wait) as placement:
        write_untrained_model(Path(untrained), config.model.config, data.tokenizer)
        actor = Cluster(
            ActorWorker,
            role=ROLE,
            degrees=degrees,
            placement=placement,
            worker_kwargs={
                "settings": config.strategy_settings(ROLE, Path(untrained)),
                "timeout_s": config.process_group_timeout_s,
            },
            call_timeout_s=config.ray.call_timeout_s,
            start_timeout_s=config.ray.start_timeout_s,
            rows_on=config.rows_on,
        )
        actor.call("initialize")
        loss = float("nan")
        for _ in track(range(settings.steps), description="warm start", console=console, transient=True):
            rows = batch.select_idxs(next(sampler))
            loss = actor.call("train_supervised", with_plan(rows, degrees.dp, settings.micro_batch))[0]["loss"]
        actor.call("save_hf", folder.absolute())
    console.print(f"warm start: {settings.steps} steps, last loss {loss:.3f}")
