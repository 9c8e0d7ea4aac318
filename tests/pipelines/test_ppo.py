"""PPO end to end on real parts: Ray actors, Megatron-Core on gloo, transformers generation, reasoning-gym.

The runs are short: they show that the parts fit together, not that the policy improves. That takes minutes, and is
what `make ppo` shows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ModelConfig
from tests.pipelines.small_run import ROOT, SMALL


def command(output_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "examples/run_ppo.py", f"output_dir={output_dir}", *SMALL, *overrides]


def run(output_dir: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(output_dir, *overrides),
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def ray_processes() -> list[int]:
    """Processes of a Ray that a run started: they outlive their driver if nobody ends them."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "raylet" in " ".join(p.info["cmdline"] or [])[:300]]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    output_dir = tmp_path_factory.mktemp("runs")
    outcome = run(output_dir, "name=first")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return output_dir / "first"


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(first_run: Path) -> None:
    metrics = [json.loads(line) for line in (first_run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [0, 1, 2]
    for record in metrics[1:]:
        assert {"reward", "kl", "entropy", "loss", "grad_norm", "critic/loss", "eval/exact_match"} <= record.keys()
        assert record["skipped_steps"] == record["critic/skipped_steps"] == 0
        assert "not_finite" not in record
    # Before the first update the policy is the reference, and the first optimizer step has ratio 1 everywhere.
    assert abs(metrics[1]["kl"]) < 1e-5
    samples = [json.loads(line) for line in (first_run / "samples" / "step_00001.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert samples[0].keys() == {"prompt", "response", "reward", "answer"}
    assert (first_run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (first_run / "config.yaml").is_file()
    assert list((first_run / "tensorboard").iterdir())


@pytest.mark.slow
def test_the_final_model_is_a_hugging_face_folder(first_run: Path) -> None:
    final = first_run / "final"
    model = ModelConfig.from_folder(final)
    HfFolder(final, model).check("lm")
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert model.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("gentile =")["input_ids"], skip_special_tokens=True) == "gentile ="
    start = next(first_run.parent.glob("warm_start-*"))
    name = "model.layers.1.feed_forward.w2.weight"
    trained, untrained = (HfFolder(folder, model).part(name, None, 0, 1) for folder in (final, start))
    assert not torch.equal(trained, untrained)


@pytest.mark.slow
def test_two_runs_with_one_seed_write_the_same_metrics(first_run: Path) -> None:
    outcome = run(first_run.parent, "name=second")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "warm start: using" in outcome.stdout
    second = first_run.parent / "second"
    assert (second / "metrics.jsonl").read_bytes() == (first_run / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_the_actor_may_be_a_pipeline(first_run: Path) -> None:
    outcome = run(first_run.parent, "name=pp2", "actor.parallel.tp=1", "actor.parallel.pp=2")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (first_run.parent / "pp2", first_run)
    )
    # The same numbers up to rounding, as long as rounding changes no sampled token: the first step's.
    for name in ("reward", "entropy", "loss", "grad_norm", "critic/loss"):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_ctrl_c_ends_cleanly(first_run: Path) -> None:
    before = set(ray_processes())
    process = subprocess.Popen(
        command(first_run.parent, "name=stopped", "ppo.steps=500"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = first_run.parent / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "stopped" in output
    for line in metrics.read_text().splitlines():
        json.loads(line)
    assert set(ray_processes()) <= before


@pytest.mark.slow
def test_a_bad_reward_function_ends_the_run(first_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(responses, entries):\n    return [1.0]\n")
    outcome = run(first_run.parent, "name=bad", "reward.function=my_rewards:score", PYTHONPATH=str(tmp_path))
    assert outcome.returncode == 1
    assert "returned 1 rewards for 16 responses" in outcome.stderr
    assert "reward rank 0" in outcome.stderr


def test_wrong_settings_are_listed_before_anything_starts(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, "actor.parallel.tpp=2", "actor.world_size=3", "ppo.mini_batch_size=7", "critic.strategy=deepspeed"
    )
    assert outcome.returncode == 2
    for message in (
        "did you mean actor.parallel.tp",
        "actor.world_size: 3",
        "ppo.mini_batch_size: 7",
        "critic.strategy",
    ):
        assert message in outcome.stderr, outcome.stderr
    assert not list(tmp_path.iterdir())


def test_a_prompt_longer_than_its_limit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    outcome = run(tmp_path, "task.max_prompt_tokens=4")
    assert outcome.returncode == 2
    assert "max_prompt_tokens" in outcome.stderr
    assert not list(tmp_path.iterdir())
