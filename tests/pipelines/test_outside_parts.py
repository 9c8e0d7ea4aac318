"""One real run with a user's own parts: algorithm, engine, environment, reward function and family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config import ModelConfig, dump_config, load_config
from roll.data.tasks import Entry
from roll.pipelines.rl_config import RLConfig
from tests.families import OUTSIDE as FAMILY
from tests.pipelines.conftest import Head
from tests.pipelines.grpo_run import SMALL_GRPO, grpo_config
from tests.pipelines.small_run import EXAMPLES, example, outcome_of

PARTS = [
    "algorithm={name: 'tests.outside.reinforce:Reinforce', longest: 16.0}",
    f"warm_start.model.config.model_type={FAMILY}",
    # Token 2 is the end token, the others are letters.
    "rollout.engine={name: 'tests.outside.table:Table', answers: [[30, 2], [31, 32, 2], [33, 34, 35]]}",
    "rollout.max_new_tokens=16",
    "reward.environment=tests.outside.asking:Asking",
    "reward.function=tests.pipelines.test_outside_parts:share_of_short_ones",
]


def share_of_short_ones(responses: list[str], entries: list[Entry]) -> list[float]:
    """A reward function: 1 for a response of one letter, half of it for one of two, nothing for others."""
    return [{1: 1.0, 2: 0.5}.get(len(response), 0.0) for response in responses]


@pytest.mark.slow
def test_a_run_of_parts_from_outside(head: Head, tmp_path: Path) -> None:
    arguments = ["--config", str(EXAMPLES / "grpo_cpu.yaml"), f"output_dir={tmp_path}", "name=outside", *SMALL_GRPO]
    with example("run_ppo.py", *arguments, *PARTS, RAY_ADDRESS=head.address) as process:
        outcome = outcome_of(process)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "Reinforce on spell_backward: 2 steps" in outcome.stdout
    assert ModelConfig.from_folder(tmp_path / "outside" / "final", FAMILY).model_type == FAMILY

    lines = (tmp_path / "outside" / "metrics.jsonl").read_text().splitlines()
    before, first, second = (json.loads(line) for line in lines)
    assert before.keys() == {"step", "eval/exact_match", "eval/reward", "eval/episode/asked"}
    # An engine that draws from a table answers the same, whatever the weights are.
    assert before["eval/reward"] == first["eval/reward"] == second["eval/reward"]
    # Nobody is asked for log-probs, values or entropies; there is one role to train.
    updates = {"nll", "loss", "grad_norm", "lr", "skipped_steps"}
    credit = {"baseline", "score", "reward", "exact_match", "response_length"}
    assert first.keys() == before.keys() | updates | credit | {"episode/asked"}
    assert first["skipped_steps"] == 0 and first["grad_norm"] > 0
    assert (first["baseline"], second["baseline"]) == (0.0, pytest.approx(0.1 * first["reward"]))
    assert 1 < first["episode/asked"] <= 3 and 0 < first["reward"] < 1
    samples = (tmp_path / "outside" / "samples" / "step_00001.jsonl").read_text()
    assert "no " in samples, "some environment asked again"
    logs = {path.name for path in (tmp_path / "outside" / "logs").iterdir()}
    assert logs == {"actor_0.log", "actor_1.log", "reward_0.log", "rollout_0.log"}


def test_the_settings_of_such_a_run_are_written_and_read_back(tmp_path: Path) -> None:
    config = grpo_config(*PARTS)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(RLConfig, tmp_path / "config.yaml") == config
