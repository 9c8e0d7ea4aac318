"""A run of the real roles with an engine, an environment and a reward function from outside of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.config import dump_config, load_config
from roll.config.ppo import PPOConfig
from roll.data.tasks import Entry
from tests.pipelines.small_run import EXAMPLES, SMALL, run

SEAMS = [
    # Token 2 is the end token, the others are the letters of some words.
    "rollout.engine={name: 'tests.outside.table:Table', answers: [[30, 2], [31, 32, 2], [33, 34, 35, 36, 37, 38]]}",
    "reward.environment=tests.outside.asking:Asking",
    "reward.function=tests.outside.test_run:share_of_short_ones",
    "rollout.max_new_tokens=12",
]


def share_of_short_ones(responses: list[str], entries: list[Entry]) -> list[float]:
    """A reward function: 1 for a response of one letter, half of it for one of two, nothing for others."""
    return [{1: 1.0, 2: 0.5}.get(len(response), 0.0) for response in responses]


@pytest.mark.slow
def test_a_run_with_seams_from_outside(tmp_path: Path) -> None:
    outcome = run(tmp_path, "name=outside", "ppo.steps=1", *SEAMS)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    before, after = map(json.loads, (tmp_path / "outside" / "metrics.jsonl").read_text().splitlines())
    # An engine that draws from a table answers the same, whatever the weights are.
    assert before["eval/reward"] == after["eval/reward"]
    assert 1 <= after["episode/asked"] <= 3 and 0 < after["reward"] < 1
    assert after["skipped_steps"] == 0
    samples = (tmp_path / "outside" / "samples" / "step_00001.jsonl").read_text()
    assert "no " in samples, "some environment asked again"


def test_the_settings_of_such_a_run_are_written_and_read_back(tmp_path: Path) -> None:
    config = load_config(PPOConfig, EXAMPLES / "ppo_cpu.yaml", [*SMALL, *SEAMS])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(PPOConfig, tmp_path / "config.yaml") == config
