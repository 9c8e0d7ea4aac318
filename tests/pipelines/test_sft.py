"""Supervised runs end to end: what they leave, that a resumed one is the same run, and fine-tuning of its result."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ModelConfig, SFTConfig, load_config
from roll.pipelines.sft import run_sft
from roll.pipelines.sft_data import load_sft_data
from tests.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "sft_cpu.yaml"
SMALL = [
    f"data.files=[{ROOT / 'README.md'}]",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "seq_len=32",
    "steps=4",
    "eval_every=2",
    "save_every=null",
    "optimizer={lr: 1e-3}",
]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(overrides: list[str]) -> None:
    """One rank of a run."""
    config = load_config(SFTConfig, EXAMPLE, [*SMALL, *overrides])
    run_sft(config, load_sft_data(config), Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two data-parallel ranks as a user starts it, and what it printed."""
    output_dir = tmp_path_factory.mktemp("runs")
    outcome = subprocess.run(
        [sys.executable, "examples/run_sft.py", *SMALL, f"output_dir={output_dir}", "name=one", "save_every=2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return output_dir / "one", outcome.stdout


def test_a_run_leaves_what_it_promises(finished: tuple[Path, str]) -> None:
    run_dir, output = finished
    first, *steps = records(run_dir)
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert [record["step"] for record in (first, *steps) if "eval/loss" in record] == [0, 2, 4]
    assert steps[-1]["eval/loss"] < first["eval/loss"]
    for record in steps:
        assert {"loss", "grad_norm", "lr", "labels", "real_tokens"} <= record.keys()
        assert record["real_tokens"] == 1.0  # Packs are full but for the last of an epoch.
        assert "not_finite" not in record
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(SFTConfig, run_dir / "config.yaml").steps == 4
    assert list((run_dir / "tensorboard").iterdir())
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["newest.json", "step_00004"]
    assert "step 4/4" in output and "tokens/s" in output and f"done: {run_dir}" in output
    final = run_dir / "final"
    HfFolder(final, ModelConfig.from_folder(final)).check("lm")
    tokenizer = AutoTokenizer.from_pretrained(final)
    assert tokenizer.decode(tokenizer("`a | b`")["input_ids"]) == "`a | b`"


def test_a_resumed_run_is_the_run_that_never_stopped(ranks: RankPool, tmp_path: Path) -> None:
    here = [f"output_dir={tmp_path}", "eval_every=1"]
    alone = ["world_size=1", "micro_num=4"]
    ranks.run(train, [*here, *alone, "name=whole"], world_size=1)
    ranks.run(train, [*here, *alone, "name=stopped", "steps=2", "save_every=2"], world_size=1)
    two_ranks = {"data_parallel": ["micro_num=2"], "ring": ["micro_num=4", "parallel={cp: 2, cp_comm: ring}"]}
    for name in two_ranks:
        shutil.copytree(tmp_path / "stopped", tmp_path / name)
    ranks.run(train, [*here, *alone, "name=stopped", "resume=true"], world_size=1)
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    for name, settings in two_ranks.items():
        ranks.run(train, [*here, "world_size=2", *settings, f"name={name}", "resume=true"], world_size=2)
        for ours, theirs in zip(records(tmp_path / name), records(tmp_path / "whole"), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name  # fp32, summed in another order


def test_a_run_can_be_fine_tuned_under_isp(ranks: RankPool, finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = finished
    source = [f"model={{path: {run_dir / 'final'}, config: null}}", "alphabet=null"]
    settings = [f"output_dir={tmp_path}", "name=tuned", "parallel={mode: isp, sp: 2, wp: 2}", "steps=2"]
    ranks.run(train, [*source, *settings], world_size=2)
    before, after = records(run_dir)[-1], records(tmp_path / "tuned")
    assert after[0]["eval/loss"] == pytest.approx(before["eval/loss"], rel=1e-5)
    assert after[-1]["eval/loss"] < after[0]["eval/loss"]
    HfFolder(tmp_path / "tuned" / "final", ModelConfig.from_folder(tmp_path / "tuned" / "final")).check("lm")


def test_what_cannot_be_run_is_refused_and_leaves_all_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^resume: .*/none holds no checkpoint$"):
        train([f"output_dir={tmp_path}", "name=none", "world_size=1", "resume=true"])
    stopped = [f"output_dir={tmp_path}", "name=stopped", "world_size=1"]
    ranks.run(train, [*stopped, "steps=2", "save_every=2"], world_size=1)
    before = {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    with pytest.raises(ValueError, match=r"^resume: the saved num_packs is \d+, this dataset's is \d+$"):
        train([*stopped, "resume=true", "seq_len=64"])
    with pytest.raises(ValueError, match=r"^steps: 1 is less than the checkpoint's 2$"):
        train([*stopped, "resume=true", "steps=1"])
    assert before == {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    with pytest.raises(ValueError, match=r"^world_size: 2, but 1 ranks were started$"):
        train([f"output_dir={tmp_path}", "name=none"])
    with pytest.raises(ValueError, match=r"^data\.files: nothing is at 'no/\*\.txt'$"):
        train([f"output_dir={tmp_path}", "data.files=['no/*.txt']"])
