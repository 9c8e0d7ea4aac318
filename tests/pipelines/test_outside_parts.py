"""One real run with a user's own parts: an algorithm with its settings, and a family, from outside the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config import ModelConfig
from tests.families import OUTSIDE as FAMILY
from tests.pipelines.conftest import Head
from tests.pipelines.grpo_run import SMALL_GRPO
from tests.pipelines.small_run import EXAMPLES, example, outcome_of

ALGORITHM = "algorithm={name: 'tests.outside.reinforce:Reinforce', longest: 6.0}"


@pytest.mark.slow
def test_a_run_of_parts_from_outside(head: Head, tmp_path: Path) -> None:
    family = f"warm_start.model.config.model_type={FAMILY}"
    arguments = ["--config", str(EXAMPLES / "grpo_cpu.yaml"), f"output_dir={tmp_path}", "name=outside", *SMALL_GRPO]
    with example("run_ppo.py", *arguments, ALGORITHM, family, RAY_ADDRESS=head.address) as process:
        outcome = outcome_of(process)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "Reinforce on spell_backward: 2 steps" in outcome.stdout
    assert ModelConfig.from_folder(tmp_path / "outside" / "final", FAMILY).model_type == FAMILY

    lines = (tmp_path / "outside" / "metrics.jsonl").read_text().splitlines()
    before, first, second = (json.loads(line) for line in lines)
    assert before.keys() == {"step", "eval/exact_match", "eval/reward"}
    # Nobody is asked for log-probs, values or entropies; there is one role to train.
    updates = {"nll", "loss", "grad_norm", "lr", "skipped_steps"}
    credit = {"baseline", "score", "reward", "exact_match", "response_length"}
    assert first.keys() == before.keys() | updates | credit
    assert first["skipped_steps"] == 0 and first["grad_norm"] > 0
    assert (first["baseline"], second["baseline"]) == (0.0, pytest.approx(0.1 * first["reward"]))
    logs = {path.name for path in (tmp_path / "outside" / "logs").iterdir()}
    assert logs == {"actor_0.log", "actor_1.log", "reward_0.log", "rollout_0.log"}
