"""One step of the loop with roles that answer from a script: what it makes of their metrics."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from roll.algorithms import Credit, LossTerm, entropy_term
from roll.algorithms.grpo import GRPO
from roll.algorithms.registry import make_algorithm
from roll.config import load_config
from roll.data.prompts import PromptSampler
from roll.environments.environment import Turn
from roll.environments.episodes import Finished
from roll.generation.batches import pack_responses
from roll.generation.records import Response, Stop
from roll.pipelines.prompt_data import load_prompt_data
from roll.pipelines.rl import RLPipeline
from roll.pipelines.rl_config import RLConfig
from roll.pipelines.rl_metrics import rate_zero_notes
from roll.pipelines.roles import Roles, ranks_of_roles
from roll.pipelines.tracker import RunTracker
from roll.protocol import DataProto
from tests.pipelines.grpo_run import grpo_config
from tests.pipelines.small_run import EXAMPLES, SMALL


class ScriptedRole:
    """A role of one rank. A script is the value of a method, or a function of its arguments."""

    def __init__(self, role: str, **scripts: Any) -> None:
        self.cluster = SimpleNamespace(role=role, degrees=SimpleNamespace(dp=1, pp=1))
        for method, script in scripts.items():
            setattr(self, method, ScriptedMethod(script))


class ScriptedMethod:
    def __init__(self, script: Any) -> None:
        self.script = script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.script(*args, **kwargs) if callable(self.script) else self.script

    def submit(self, *args: Any) -> Any:
        return SimpleNamespace(result=lambda: self(*args))


def per_token(**values: float) -> Callable[[DataProto], DataProto]:
    def script(batch: DataProto) -> DataProto:
        mask = batch["response_mask"][:, 1:]
        return DataProto.from_dict({name: value * mask.float() for name, value in values.items()})

    return script


def begin(prompts: list[list[int]], entries: list[Any]) -> list[Turn]:
    return [Turn(prompt) for prompt in prompts]


def step(responses: list[Response]) -> list[Finished]:
    return [Finished(reward=1.0, metrics={}, text="text", exact=1.0) for _ in responses]


def generate(requests: DataProto, **_: Any) -> DataProto:
    """Every prompt with the response `a`, and nothing behind it."""
    return pack_responses([Response(row, (7, 2), None, Stop.END, 1) for row in range(len(requests))], 6)


def generating_roles() -> dict[str, ScriptedRole]:
    """The roles that play episodes."""
    return {
        "rollout": ScriptedRole("rollout", generate=generate, open_update=None, close_update=None),
        "reward": ScriptedRole("reward", begin=begin, step=step),
    }


SENDS_NOTHING = {"declare": {}, "next_bucket": [None]}


def gets(*fields: str, answer: Callable[[], Any]) -> Callable[[DataProto, Any], Any]:
    """The answer to a batch that has the tokens and these fields, and no others."""

    def script(batch: DataProto, terms: Any) -> Any:
        assert batch.tensors.keys() == {"input_ids", "attention_mask", "response_mask", *fields}
        return answer()

    return script


def step_metrics(tmp_path: Path, actor_steps: list[dict[str, float]], *overrides: str) -> dict[str, float]:
    """The metrics of a first step whose four optimizer steps of the actor report `actor_steps`."""
    config = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, *overrides])
    data = load_prompt_data(config)
    reported = iter(actor_steps)
    roles = {
        "actor": ScriptedRole(
            "actor",
            compute_log_probs=per_token(log_probs=-2.0, entropy=1.5),
            train=gets("log_probs", "advantages", answer=lambda: [next(reported)]),
            **SENDS_NOTHING,
        ),
        "critic": ScriptedRole(
            "critic",
            compute_values=per_token(values=0.5),
            train=gets("values", "returns", answer=lambda: [{"loss": 3.0}]),
        ),
        "reference": ScriptedRole("reference", compute_log_probs=per_token(log_probs=-2.5))
        if "reference" in ranks_of_roles(config)
        else None,
        **generating_roles(),
    }
    tracker = RunTracker(tmp_path, config_yaml="", total_steps=1, title="", console=Console(file=io.StringIO()))
    with tracker:
        pipeline = RLPipeline(config, data, Roles(**cast(dict[str, Any], roles)), tracker)
        metrics, tokens = pipeline.step(1)
    sampled = data.train.select_idxs(next(PromptSampler(64, 8, config.seed)))
    assert tokens == 2 * (int(sampled["attention_mask"].sum()) + 8 * 2)
    assert next(reported, None) is None
    return metrics


class KeepsTheFirst(GRPO):
    """Learns from the first response of each group, and reads nothing of the policy that sampled."""

    def credit(self, batch: DataProto) -> Credit:
        assert batch["group"].tolist() == [i // 2 for i in range(16)]
        first = torch.arange(len(batch)) % 2 == 0
        return Credit({"advantages": torch.ones(len(batch), batch["response_mask"].shape[1] - 1)}, kept=first)

    def losses(self) -> dict[str, list[LossTerm]]:
        return {"actor": [LossTerm(function=entropy_term(1.0, per=1.0).function, reads=frozenset({"advantages"}))]}


def test_an_algorithm_gets_the_roles_and_fields_that_it_declares_and_no_others(tmp_path: Path) -> None:
    """The scripted actor knows neither look-ups nor other names; there is no critic and no reference."""
    name = f"algorithm={{name: '{__name__}:KeepsTheFirst', kl_coef: 0}}"
    config = grpo_config(name)
    assert ranks_of_roles(config).keys() == {"actor", "rollout", "reward"}
    data = load_prompt_data(config)
    sent: list[DataProto] = []

    def train(batch: DataProto, terms: list[LossTerm]) -> list[dict[str, float]]:
        sent.append(batch)
        return [{"loss": 2.0}]

    roles = {
        "actor": ScriptedRole("actor", train=train, **SENDS_NOTHING),
        "critic": None,
        "reference": None,
        **generating_roles(),
    }
    with RunTracker(tmp_path, config_yaml="", total_steps=1, title="", console=Console(file=io.StringIO())) as tracker:
        metrics, _ = RLPipeline(config, data, Roles(**cast(dict[str, Any], roles)), tracker).step(1)
    assert metrics == {"reward": 1.0, "exact_match": 1.0, "response_length": 2.0, "loss": 2.0}
    assert {frozenset(batch.tensors) for batch in sent} == {
        frozenset({"input_ids", "attention_mask", "response_mask", "advantages"})
    }
    learned = torch.cat([batch["response_mask"].sum(dim=1) for batch in sent])
    assert sorted(learned.tolist()) == [0] * 16 + [2] * 16  # Two passes over 8 responses of two tokens.


def test_the_actor_waits_for_the_critic(tmp_path: Path) -> None:
    warm_up = "algorithm.critic_warmup_steps=1"
    assert step_metrics(tmp_path, [], warm_up)["critic/loss"] == pytest.approx(3.0)


def test_the_entropy_of_a_step_is_the_sampling_policys(tmp_path: Path) -> None:
    updates = [{"loss": float(i), "entropy": 0.25 * i} for i in range(4)]
    metrics = step_metrics(tmp_path, updates)
    assert metrics["entropy"] == pytest.approx(1.5)
    assert metrics["loss"] == pytest.approx(1.5)
    assert metrics["critic/loss"] == pytest.approx(3.0)
    assert metrics["reward"] == pytest.approx(1.0)


def test_a_skipped_optimizer_step_may_report_less(tmp_path: Path) -> None:
    skipped, whole = {"lr": 0.1, "skipped_steps": 1.0}, {"loss": 4.0, "skipped_steps": 0.0, "ratio": 1.25}
    for updates in ([skipped, whole, whole, whole], [whole, whole, whole, skipped]):
        metrics = step_metrics(tmp_path, updates)
        assert metrics["loss"] == pytest.approx(4.0)  # Of the steps that were taken, as all they report.
        assert metrics["skipped_steps"] == pytest.approx(0.25)
        assert metrics["ratio"] == pytest.approx(1.25)  # Of the steps that were taken.


def test_without_a_penalty_there_is_no_reference(tmp_path: Path) -> None:
    updates = [{"loss": 1.0}] * 4
    metrics = step_metrics(tmp_path, updates, "algorithm.kl={kind: fixed, coef: 0.0}")
    assert metrics["kl_coef"] == 0 and "kl" not in metrics
    # Two tokens, each with k1 = -2.0 + 2.5.
    assert step_metrics(tmp_path, updates, "algorithm.kl={kind: fixed, coef: 0.001}")["kl"] == pytest.approx(1.0)


def test_a_run_that_is_longer_than_its_schedule_says_so_at_the_start() -> None:
    # 10 steps of 16 rows in mini-batches of 8, in two passes: 40 updates of the critic, 36 of the actor.
    def notes(total_steps: int, min_lr: float = 0.0) -> list[str]:
        schedule = f"{{warmup_steps: 0, schedule: linear, total_steps: {total_steps}, min_lr: {min_lr}}}"
        run = ["steps=10", "epochs=2", "algorithm.critic_warmup_steps=1"]
        optimizers = [f"{role}.optimizer={schedule}" for role in ("actor", "algorithm.critic")]
        config = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, *run, *optimizers])
        return list(rate_zero_notes(config, make_algorithm(config.algorithm)))

    assert notes(40) == notes(8, min_lr=1e-5) == []
    reason = "schedule linear ended at total_steps 36 with min_lr 0.0. A larger total_steps or min_lr goes on."
    assert notes(36) == [f"critic: optimizer step 37 and all behind it have learning rate 0: {reason}"]
    assert [note.split(":")[0] for note in notes(35)] == ["actor", "critic"]
