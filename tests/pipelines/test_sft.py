"""Supervised runs end to end: what they leave, that a resumed one is the same run, and fine-tuning of its result."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from roll.checkpoint.checksums import CHECKSUMS
from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ModelConfig, SFTConfig, load_config
from roll.data.sources.tokenized_folder import write_tokenized
from roll.data.tokenizer import build_char_tokenizer
from roll.pipelines.sft import run_sft
from roll.pipelines.sft_data import load_sft_data
from tests.log_messages import messages
from tests.pipelines.small_run import ARCHITECTURE, EXAMPLES, example, outcome_of
from tests.processes import descendants, wait_for_end, wait_until
from tests.rank_pool import RankError, RankPool

EXAMPLE = EXAMPLES / "sft_text_cpu.yaml"
TEXT = Path(__file__).with_name("training_text.txt")
"""The multiplication table in words, in 36 paragraphs: no edit of the project's own texts changes a value here."""
SMALL = [
    f"data.files=[{TEXT}]",
    *[f"model.config.{setting}" for setting in ARCHITECTURE],
    "seq_len=32",
    "steps=4",
    "eval_every=2",
    "save_every=null",
    "optimizer={lr: 1e-3}",
]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(overrides: list[str]) -> str:
    """One rank of a run; what it has written to its console."""
    config, written = load_config(SFTConfig, EXAMPLE, [*SMALL, *overrides]), io.StringIO()
    run_sft(config, load_sft_data(config), Console(file=written))
    return written.getvalue()


def command(*overrides: str, **launched: Any) -> AbstractContextManager[subprocess.Popen[str]]:
    """A small supervised run as a user starts it."""
    return example("run_sft.py", "--config", str(EXAMPLE), *SMALL, *overrides, **launched)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two data-parallel ranks under torchrun, and what it printed."""
    output_dir = tmp_path_factory.mktemp("runs")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with command(f"output_dir={output_dir}", "name=one", "save_every=2", launcher=torchrun) as process:
        outcome = outcome_of(process)
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
    assert "step 4/4" in output and "tokens/s" in output and output.count("SFT one") == 1
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


def train_listening(overrides: list[str]) -> list[str]:
    """One rank of a run, and what it logs about its schedule."""
    with messages("roll.strategies.progress") as texts:
        train(overrides)
    return texts


def test_a_run_whose_schedule_has_ended_is_extended(ranks: RankPool, tmp_path: Path) -> None:
    common = [f"output_dir={tmp_path}", "name=run", "world_size=1", "eval_every=100", "save_every=4"]

    def schedule(total_steps: int) -> str:
        return f"optimizer={{lr: 1e-3, min_lr: 0.0, warmup_steps: 0, schedule: linear, total_steps: {total_steps}}}"

    def rates(name: str) -> list[float]:
        return [record["lr"] for record in records(tmp_path / name) if "lr" in record]

    assert ranks.run(train_listening, [*common, schedule(4)], world_size=1) == [[]]
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    longer = ranks.run(train_listening, [*common, schedule(8), "resume=true", "steps=6"], world_size=1)
    assert longer == [["optimizer settings of this run replace the checkpoint's: total_steps 4 -> 8"]]
    # 1e-3 less a quarter at each step, then (from step 5 on) less an eighth for each step since the start.
    assert rates("run") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 5e-4, 3.75e-4], rel=1e-9)
    (texts,) = ranks.run(train_listening, [*common, "name=same", schedule(4), "resume=true", "steps=6"], world_size=1)
    assert rates("same")[4:] == [0.0, 0.0]
    assert len(texts) == 1 and texts[0].startswith("optimizer step 5 and all behind it have learning rate 0")


RAMP_UP = "ramp_up={start: 4, increment: 4, every: 1}"
LAYOUTS = {
    "fsp tp 2 x pp 2": ("packed", "parallel={mode: fsp, tp: 2, pp: 2}", "micro_num=8", RAMP_UP),
    "isp 2 x 2 x dp 2": ("packed", "parallel={mode: isp, sp: 2, wp: 2}", "micro_num=4", RAMP_UP.replace("4", "2")),
    "mtp tp 2 x dp 2": ("rows", "parallel={mode: mtp, tp: 2}", "micro_num=4"),
}
SINGLE = {"packed": ("micro_num=8", RAMP_UP), "rows": ("micro_num=8",)}


@pytest.mark.slow
def test_every_split_of_the_model_is_the_run_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    """The same losses and norms up to the order of fp32 sums, while the batch grows, packed and in rows."""
    common = [f"output_dir={tmp_path}", "eval_every=3", "steps=3"]
    layout = {"packed": "use_packed_dataset=true", "rows": "use_packed_dataset=false"}
    for data, settings in SINGLE.items():
        ranks.run(train, [*common, f"name={data}", "world_size=1", layout[data], *settings], world_size=1)
    for number, (title, (data, *settings)) in enumerate(LAYOUTS.items()):
        ranks.run(train, [*common, f"name=run{number}", "world_size=4", layout[data], *settings], world_size=4)
        ours, theirs = records(tmp_path / f"run{number}"), records(tmp_path / data)
        assert len(ours) == len(theirs) == 4
        for record, expected in zip(ours, theirs, strict=True):
            assert record == pytest.approx(expected, rel=2e-5), title
    # Two rows of 32 tokens are a pack, and few of the tokens are no labels: their number tells 4 packs from 8.
    first, *later = [record["labels"] for record in records(tmp_path / "packed")[1:]]
    assert 4 * 28 <= first // 2 <= 4 * 32, "4 packs of two rows"
    assert all(8 * 28 <= labels // 2 <= 8 * 32 for labels in later), "the batch grew once, to 8"


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_whole_files(tmp_path: Path) -> None:
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    settings = [f"output_dir={tmp_path}", "name=stopped", "steps=5000", "save_every=1"]
    with command(*settings) as process:
        wait_until(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 3, process)
        family = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        outcome = outcome_of(process)
    assert outcome.returncode == 130, outcome.stdout + outcome.stderr
    assert "stopped" in outcome.stdout
    wait_for_end(family)
    steps = [record["step"] for record in records(tmp_path / "stopped")]
    assert steps == list(range(len(steps)))
    saved = json.loads((tmp_path / "stopped" / "checkpoints" / "newest.json").read_text())["step"]
    assert saved in (steps[-1] - 1, steps[-1])
    assert not (tmp_path / "stopped" / "final").exists()


def write_sources(folder: Path) -> None:
    """The same two samples, `ab` and `cd` with their ends, as conversations and as tokens."""
    rows = [{"prompt": text[0], "response": text[1]} for text in ("ab", "cd")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_char_tokenizer("abcd")
    write_tokenized(folder / "tokens.bin", [[-ids[0], ids[1], 2] for ids in map(tokenizer.encode, ("ab", "cd"))])


def test_every_kind_of_source_is_read(tmp_path: Path) -> None:
    write_sources(tmp_path)
    common = ["alphabet=abcd", "data.held_out_share=0", "seq_len=8", "micro_bsz=1", f"data.cache_dir={tmp_path}/cache"]
    for kind, file in {"conversations": "rows.jsonl", "tokenized": "tokens.bin"}.items():
        config = load_config(
            SFTConfig, EXAMPLE, [*SMALL, *common, f"data.kind={kind}", f"data.files=[{tmp_path / file}]"]
        )
        data = load_sft_data(config)
        assert data.notes == ("2 samples to train on, 6 tokens in 1 packs",)
        pack = data.train[0]
        rows = sorted([pack.input_ids[:3].tolist(), pack.input_ids[3:6].tolist()])
        assert rows == [[4, 5, 2], [6, 7, 2]]
        assert sorted(pack.labels.tolist()) == [-100, -100, -100, -100, 2, 2, 5, 7]


def test_a_run_can_be_fine_tuned_under_isp(ranks: RankPool, finished: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, _ = finished
    start = shutil.copytree(run_dir / "final", tmp_path / "start")
    beside = {"generation_config.json": "{ }", "chat_template.jinja": "{{ x }}", "modeling_own.py": "import ray\n"}
    for name, text in beside.items():
        (start / name).write_text(text)
    content = json.loads((start / "config.json").read_text()) | {"auto_map": {"AutoModel": "modeling_own.Own"}}
    (start / "config.json").write_text(json.dumps(content))
    source = [f"model={{path: {start}, config: null}}", "alphabet=null"]
    settings = [f"output_dir={tmp_path}", "name=tuned", "parallel={mode: isp, sp: 2, wp: 2}", "steps=2"]
    ranks.run(train, [*source, *settings], world_size=2)
    before, after = records(run_dir)[-1], records(tmp_path / "tuned")
    assert after[0]["eval/loss"] == pytest.approx(before["eval/loss"], rel=1e-5)
    assert after[-1]["eval/loss"] < after[0]["eval/loss"]
    final = tmp_path / "tuned" / "final"
    HfFolder(final, ModelConfig.from_folder(final)).check("lm")
    files = {path.name: path.read_bytes() for path in start.iterdir() if "safetensors" not in path.name}
    assert files.keys() > {*beside, "tokenizer.json", "tokenizer_config.json"}
    assert files == {path.name: path.read_bytes() for path in final.iterdir() if "safetensors" not in path.name}


def test_what_cannot_be_run_is_refused_and_leaves_all_as_it_was(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^resume: .*/none holds no checkpoint$"):
        train([f"output_dir={tmp_path}", "name=none", "world_size=1", "resume=true"])
    stopped = [f"output_dir={tmp_path}", "name=stopped", "world_size=1"]
    ranks.run(train, [*stopped, "steps=2", "save_every=2"], world_size=1)
    before = {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    with pytest.raises(ValueError, match=r"^resume: the checkpoint has other settings: seq_len 32 there, 64 here$"):
        train([*stopped, "resume=true", "seq_len=64"])
    with pytest.raises(ValueError, match=r"other settings: seed 0 there, 1 here; .*micro_bsz \d there, 9 here$"):
        train([*stopped, "resume=true", "seed=1", "micro_bsz=9"])
    with pytest.raises(ValueError, match=r"^steps: 1 is less than the checkpoint's 2$"):
        train([*stopped, "resume=true", "steps=1"])
    assert before == {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    # Bad data, which only reading shows: the earlier run is still there.
    write_tokenized(tmp_path / "bad.bin", [[1, 999]] * 40)
    bad = ["data.kind=tokenized", f"data.files=[{tmp_path / 'bad.bin'}]", "data.held_out_share=0"]
    with pytest.raises(RankError, match=r"bad\.bin line \d+: token 1 has id 999, outside the vocabulary of 100"):
        ranks.run(train, [*stopped, *bad], world_size=1)
    assert before == {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    # As an earlier version left it: more settings beside the step, no checksums in the checkpoint.
    newest, sums = (tmp_path / "stopped" / "checkpoints" / name for name in ("newest.json", f"step_00002/{CHECKSUMS}"))
    saved = newest.read_bytes(), sums.read_bytes()
    state = json.loads(newest.read_text())
    state["settings"]["optimizer"] = {"lr": 0.1}
    newest.write_text(json.dumps(state))
    sums.unlink()
    with pytest.raises(RankError, match=f"step_00002 is not a complete checkpoint .*: it holds no {CHECKSUMS}"):
        ranks.run(train, [*stopped, "resume=true"], world_size=1)
    newest.write_bytes(saved[0])
    sums.write_bytes(saved[1])
    assert before == {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    shutil.move(tmp_path / "stopped" / "checkpoints" / "step_00002", tmp_path / "gone")
    with pytest.raises(ValueError, match=r"^resume: .*newest\.json names step 2, of which there is no folder$"):
        train([*stopped, "resume=true"])
    (tmp_path / "stopped" / "checkpoints" / "newest.json").write_text("{")
    with pytest.raises(ValueError, match=r"^resume: .*newest\.json is damaged"):
        train([*stopped, "resume=true"])
    assert before == {path: path.read_bytes() for path in (tmp_path / "stopped").glob("*.*")}
    same = f"data.held_out_files=[{TEXT.parent}/./{TEXT.name}]"
    with pytest.raises(ValueError, match=r"^data\.held_out_files: also among data\.files: .*training_text\.txt$"):
        train([f"output_dir={tmp_path}", "name=none", "data.held_out_share=0", same])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"^no text to read: .*empty\.txt is empty$"):
        train([f"output_dir={tmp_path}", "name=none", "data.held_out_share=0", f"data.files=[{tmp_path}/empty.txt]"])
    with pytest.raises(ValueError, match=r"^world_size: 2, but 1 ranks were started$"):
        train([f"output_dir={tmp_path}", "name=none"])
    with pytest.raises(ValueError, match=r"^data\.files: nothing is at 'no/\*\.txt'$"):
        train([f"output_dir={tmp_path}", "data.files=['no/*.txt']"])
