"""One step of the loop with roles that answer from a script: what it makes of their metrics."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console

from roll.config import PPOConfig, load_config
from roll.pipelines.ppo import PPOPipeline
from roll.pipelines.prompt_data import load_prompt_data
from roll.pipelines.roles import Roles
from roll.pipelines.tracker import RunTracker
from roll.protocol import DataProto
from roll.workers import Cluster
from tests.pipelines.small_run import EXAMPLES, SMALL


class ScriptedRole:
    """A role of one rank. A script is the value of a method, or a function of its arguments."""

    def __init__(self, role: str, **scripts: Any) -> None:
        self.role, self.scripts, self.degrees = role, scripts, SimpleNamespace(dp=1)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        script = self.scripts[method]
        return script(*args, **kwargs) if callable(script) else script

    def submit(self, method: str, *args: Any) -> Any:
        return SimpleNamespace(result=lambda: self.call(method, *args))


def per_token(**values: float) -> Callable[[DataProto], DataProto]:
    def script(batch: DataProto) -> DataProto:
        mask = batch["response_mask"][:, 1:]
        return DataProto.from_dict({name: value * mask.float() for name, value in values.items()})

    return script


def scores(batch: DataProto) -> DataProto:
    ones, texts = torch.ones(len(batch)), np.array(["text"] * len(batch), dtype=object)
    return DataProto.from_dict({"scores": ones, "exact": ones}, non_tensors={"response": texts})


def with_responses(prompts: DataProto) -> DataProto:
    """Every prompt with the response `a`, and nothing behind it."""
    mask, response = prompts["attention_mask"], torch.tensor([[7, 2]]).expand(len(prompts), -1)
    tensors = {
        "input_ids": torch.cat([prompts["input_ids"], response], dim=1),
        "attention_mask": torch.cat([mask, torch.ones_like(response)], dim=1),
        "response_mask": torch.cat([torch.zeros_like(mask), torch.ones_like(response)], dim=1),
    }
    return DataProto.from_dict(tensors, prompts.non_tensor_batch)


def step_metrics(tmp_path: Path, actor_steps: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a first step whose four optimizer steps of the actor report `actor_steps`."""
    config = load_config(PPOConfig, EXAMPLES / "ppo_cpu.yaml", SMALL)
    data = load_prompt_data(config)
    answered = with_responses(data.train)
    reported = iter(actor_steps)
    roles = {
        "actor": ScriptedRole(
            "actor",
            compute_log_probs=per_token(log_probs=-2.0, entropy=1.5),
            train_policy=lambda *args: [next(reported)],
            weights=[],
        ),
        "critic": ScriptedRole("critic", compute_values=per_token(values=0.5), train_values=[{"loss": 3.0}]),
        "reference": ScriptedRole("reference", compute_log_probs=per_token(log_probs=-2.5)),
        "rollout": ScriptedRole(
            "rollout",
            generate=lambda prompts, **_: answered.select_idxs(list(range(len(prompts)))),
            update_weights=None,
        ),
        "reward": ScriptedRole("reward", score=scores),
    }
    tracker = RunTracker(tmp_path, config_yaml="", total_steps=1, title="", console=Console(file=io.StringIO()))
    with tracker:
        pipeline = PPOPipeline(config, data, Roles(**cast(dict[str, Cluster], roles)), tracker)
        metrics, tokens = pipeline.step(1)
    assert tokens == int(answered.select_idxs(list(range(16)))["attention_mask"].sum())
    assert next(reported, None) is None
    return metrics


def test_the_entropy_of_a_step_is_the_sampling_policys(tmp_path: Path) -> None:
    updates = [{"loss": float(i), "entropy": 0.25 * i} for i in range(4)]
    metrics = step_metrics(tmp_path, updates)
    assert metrics["entropy"] == pytest.approx(1.5)
    assert metrics["loss"] == pytest.approx(1.5)
    assert metrics["critic/loss"] == pytest.approx(3.0)
    assert metrics["reward"] == pytest.approx(1.0)


def test_a_skipped_optimizer_step_may_report_less(tmp_path: Path) -> None:
    skipped, whole = {"loss": 0.0, "skipped_steps": 1.0}, {"loss": 4.0, "skipped_steps": 0.0, "ratio": 1.25}
    for updates in ([skipped, whole, whole, whole], [whole, whole, whole, skipped]):
        metrics = step_metrics(tmp_path, updates)
        assert metrics["loss"] == pytest.approx(3.0)
        assert metrics["skipped_steps"] == pytest.approx(0.25)
        assert metrics["ratio"] == pytest.approx(1.25)  # Of the steps that were taken.
