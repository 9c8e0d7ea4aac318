"""PPO end to end on real parts: Ray actors, Megatron-Core on gloo, transformers generation, reasoning-gym.

The runs are short: they show that the parts fit together, not that the policy improves. That takes minutes, and is
what `make ppo` shows.
"""

from __future__ import annotations

import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ModelConfig, load_config
from roll.pipelines.prompt_data import load_prompt_data
from roll.pipelines.rl_config import RLConfig
from roll.strategies import HfStrategy
from tests.generation.serving import engine_of, requests
from tests.pipelines.small_run import EXAMPLES, SMALL, driver, outcome_of, share_of_letters
from tests.processes import command_line, descendants, end, wait_for_end, wait_until


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(first_run: Path) -> None:
    metrics = metrics_of(first_run)
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
    start = first_run.parent / "sft_cpu" / "final"
    assert_same_beside_weights(start, final)
    name = "model.layers.1.feed_forward.w2.weight"
    trained, untrained = (HfFolder(folder, model).part(name, None, 0, 1) for folder in (final, start))
    assert not torch.equal(trained, untrained)


def assert_same_beside_weights(start: Path, final: Path) -> None:
    """The tokenizer is copied, not written anew; config.json says the same."""
    files = {path.name: path.read_bytes() for path in start.iterdir() if "safetensors" not in path.name}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert files == {path.name: path.read_bytes() for path in final.iterdir() if "safetensors" not in path.name}


def greedy_score(folder: Path, config: RLConfig) -> float:
    """The mean score of the greedy answers of the model in `folder` to the run's held-out prompts."""
    data = load_prompt_data(config)
    model = HfStrategy(config.strategy_settings("reference", folder).model_copy(update={"name": "hf"}))
    model.initialize()
    engine = engine_of(model, data.held_out["input_ids"].shape[1] + config.rollout.max_new_tokens)
    rows = zip(data.held_out["input_ids"], data.held_out["attention_mask"], strict=True)
    asked = requests(
        [row[mask.bool()].tolist() for row, mask in rows],
        temperature=None,
        ends=data.end_token_ids,
        length=config.rollout.max_new_tokens,
    )
    answers = [response.token_ids for response in engine.generate(asked)]
    texts = data.tokenizer.batch_decode(answers, skip_special_tokens=True)
    scores = share_of_letters(texts, list(data.held_out.non_tensor_batch["entry"]))
    return sum(scores) / len(scores)


@pytest.mark.slow
def test_what_is_evaluated_is_the_trained_policy(first_run: Path) -> None:
    config = load_config(RLConfig, first_run / "config.yaml")
    before, _, after = (record["eval/reward"] for record in metrics_of(first_run))
    assert before == pytest.approx(greedy_score(first_run.parent / "sft_cpu" / "final", config))
    # The rollout role has no weights but those that the actor's were streamed into.
    assert after == pytest.approx(greedy_score(first_run / "final", config))
    assert after != pytest.approx(before), "training changed no answer, so the lines above show nothing"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_and_its_ray_cleanly_and_the_actor_may_be_a_pipeline(first_run: Path, tmp_path: Path) -> None:
    # The driver finds this module by PYTHONPATH, and so do the actors of the Ray that it starts.
    (tmp_path / "my_rewards.py").write_text("from tests.pipelines.small_run import share_of_letters as score\n")
    metrics = first_run.parent / "stopped" / "metrics.jsonl"
    settings = ["name=stopped", "steps=500", "reward.function=my_rewards:score"]
    settings += ["--config", str(EXAMPLES / "ppo_cpu_pp2.yaml")]
    with driver(first_run.parent, *settings, PYTHONPATH=str(tmp_path)) as process:
        wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2, process)
        family = descendants(process.pid)
        assert any("raylet" in " ".join(command_line(member)[:1]) for member in family)
        process.send_signal(signal.SIGINT)
        outcome = outcome_of(process)
    assert outcome.returncode == 130, outcome.stdout + outcome.stderr
    assert "stopped" in outcome.stdout
    assert metrics.read_bytes().endswith(b"\n")
    wait_for_end(family)
    # The same numbers up to rounding, as long as rounding changes no sampled token: the first step's.
    ours, theirs = (metrics_of(folder)[1] for folder in (first_run.parent / "stopped", first_run))
    for name in ("reward", "entropy", "loss", "grad_norm", "critic/loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_a_run_that_does_not_end_is_ended_with_all_that_it_started() -> None:
    deaf = (
        "import signal, threading; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); "
        "threading.Event().wait()"
    )
    starts_another = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{starts_another}; {deaf}"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["deaf\n"] * 2
    family = descendants(process.pid)
    end(process, patience_s=0.1)
    assert process.poll() is not None
    assert len(family) == 1
    wait_for_end(family)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of examples/run_ppo.py, run in this process."""
    monkeypatch.setattr(sys, "argv", ["run_ppo.py", *arguments])
    status: int = runpy.run_path(str(EXAMPLES / "run_ppo.py"))["main"]()
    return status


def test_wrong_settings_are_listed_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["actor.parallel.tpp=2", "actor.world_size=3", "mini_batch_size=7", "algorithm.critic.strategy=deepspeed"]
    # Overrides may stand on both sides of an option.
    config = ["--config", str(EXAMPLES / "ppo_cpu.yaml")]
    assert main(monkeypatch, f"output_dir={tmp_path}", *SMALL, *wrong[:2], *config, *wrong[2:]) == 2
    errors = capsys.readouterr().err
    for message in (
        "did you mean actor.parallel.tp",
        "actor.world_size: 3",
        "mini_batch_size: 7",
        "algorithm.critic.strategy",
    ):
        assert message in errors, errors
    assert not list(tmp_path.iterdir())


def test_a_prompt_longer_than_its_limit_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, f"output_dir={tmp_path}", *SMALL, "task.max_prompt_tokens=4") == 2
    assert "max_prompt_tokens" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
