"""The files and the display of a run: real files, a real event file, a real process that is interrupted."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roll.pipelines.plot import LOSS_PICTURE, loss_figure, reward_figure
from roll.pipelines.records import replace_file
from roll.pipelines.tracker import EVALUATION, RunTracker, Sample
from tests.processes import PATIENCE_S

CONFIG = "name: test\nseed: 1\n"


def tracker(run_dir: Path, **changes: Any) -> RunTracker:
    settings: dict[str, Any] = {"config_yaml": CONFIG, "total_steps": 3, "title": "PPO on sums"}
    settings["console"] = Console(file=io.StringIO())
    return RunTracker(run_dir, **(settings | changes))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    with tracker(run) as t:
        t.log(0, {"eval/exact_match": 0.25})
        with t.phase("rollout"):
            pass
        t.log(1, {"reward": 0.5, "kl": torch.tensor(0.125), "loss": np.float32(-0.5), "rows": 8}, tokens=100)
        t.log_samples(1, [Sample("1 + 2 =", "4\n", 0.0, "3"), Sample("2 + 2 =", "4", 1.0, None)])
    assert (run / "config.yaml").read_text() == CONFIG
    # The lines as they are: the step first, then names in alphabetical order.
    assert (run / "metrics.jsonl").read_text() == (
        '{"step": 0, "eval/exact_match": 0.25}\n{"step": 1, "kl": 0.125, "loss": -0.5, "reward": 0.5, "rows": 8}\n'
    )
    assert (run / "samples" / "step_00001.jsonl").read_text() == (
        '{"prompt": "1 + 2 =", "response": "4\\n", "reward": 0.0, "answer": "3"}\n'
        '{"prompt": "2 + 2 =", "response": "4", "reward": 1.0, "answer": null}\n'
    )
    assert imread(run / "reward.png").shape[2] == 4
    (events,) = (run / "tensorboard").iterdir()
    names = {"config.yaml", "metrics.jsonl", "timings.jsonl", "reward.png", "samples/step_00001.jsonl"}
    assert files(run) == names | {f"tensorboard/{events.name}"}


def test_timings_add_up_phases_and_start_anew_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that goes on by one second whenever it is read: once when the run, a phase or a step starts or ends.
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("roll.pipelines.tracker.time", clock)
    with tracker(tmp_path) as t:
        for _ in range(2):
            with t.phase("rollout"), t.phase("generate"):
                pass
        with pytest.raises(KeyError, match="counted"), t.phase("reward"):
            raise KeyError("counted all the same")
        t.log(1, {"reward": 0.0}, tokens=100)
        with t.phase(EVALUATION):
            pass
        t.log(2, {"reward": 0.0}, tokens=100)
        t.log(3, {"reward": 0.0})
        with t.phase("save"):
            pass
    # "rollout" is read at 1 and 4, then at 5 and 8; "generate" within it at 2 and 3, 6 and 7; "reward" at 9 and 10.
    phases = {"generate": 2.0, "rollout": 6.0, "reward": 1.0}
    assert lines(tmp_path / "timings.jsonl") == [
        {"step": 1, "seconds": 11.0, "tokens": 100, "tokens_per_second": 100 / 11, "phases": phases},
        # The tokens of a step are not those of its evaluation, so its second does not count for tokens/s.
        {"step": 2, "seconds": 3.0, "tokens": 100, "tokens_per_second": 50.0, "phases": {EVALUATION: 1.0}},
        {"step": 3, "seconds": 1.0, "tokens": None, "tokens_per_second": None, "phases": {}},
        {"step": None, "seconds": 3.0, "phases": {"save": 1.0}},
    ]


def test_tensorboard_holds_the_same_metrics(tmp_path: Path) -> None:
    with tracker(tmp_path) as t:
        for step in (1, 2):
            with t.phase("train"):
                pass
            t.log(step, {"reward": step / 4, "eval/exact_match": 0.5}, tokens=10)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    tags = {"reward", "eval/exact_match", "time/step", "time/tokens_per_second", "time/train"}
    assert set(accumulator.Tags()["scalars"]) == tags


def test_two_runs_write_the_same_metrics(tmp_path: Path) -> None:
    for run, order in (("a", 1), ("b", -1)):
        with tracker(tmp_path / run) as t:
            for step in range(1, 4):
                metrics = {"reward": 0.1 + 0.2, "kl": torch.tensor(0.1), "loss": 1 / (3 + step)}
                t.log(step, dict(list(metrics.items())[::order]))
    first, second = (tmp_path / run / "metrics.jsonl" for run in "ab")
    assert first.read_bytes() == second.read_bytes()
    # No digit is lost: these are the doubles themselves, fp32 values included.
    assert lines(first)[0] == {"step": 1, "kl": float(np.float32(0.1)), "loss": 0.25, "reward": 0.30000000000000004}


def test_not_finite_metrics_are_null_and_flagged(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with tracker(tmp_path, console=console) as t:
        t.log(
            1,
            {"reward": float("nan"), "eval/exact_match": float("inf"), "loss": torch.tensor(float("-inf")), "kl": 0.5},
        )
        t.log_samples(1, [Sample("1", "2", float("nan"), "3")])
        t.log(2, {"reward": 0.5})
    flags = {"eval/exact_match": "inf", "loss": "-inf", "reward": "nan"}
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kl": 0.5, "loss": None, "reward": None} | {"eval/exact_match": None, "not_finite": flags},
        {"step": 2, "reward": 0.5},
    ]
    assert lines(tmp_path / "samples" / "step_00001.jsonl")[0]["reward"] is None
    assert "step 1: metric loss is -inf" in console.file.getvalue()
    assert (tmp_path / "reward.png").exists()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "low"}, "metric 'loss' must be a number or a 0-dim tensor, got str: 'low'"),
        ({"loss": None}, "metric 'loss' must be a number"),
        ({"loss": torch.ones(1)}, "metric 'loss' must be a number or a 0-dim tensor, got Tensor"),
        ({"step": 1.0}, "may not be called 'step'"),
    ],
)
def test_bad_metrics_are_refused_and_write_nothing(tmp_path: Path, metrics: dict[str, Any], message: str) -> None:
    with tracker(tmp_path) as t, pytest.raises(ValueError, match=message):
        t.log(1, {"kl": 0.5} | metrics)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_steps_must_rise(tmp_path: Path) -> None:
    with tracker(tmp_path) as t:
        t.log(3, {})
        with pytest.raises(ValueError, match="step 3 was logged after step 3"):
            t.log(3, {})


def test_an_earlier_run_is_replaced_and_other_files_stay(tmp_path: Path) -> None:
    with tracker(tmp_path, config_yaml="old: 1\n") as t:
        for step in range(1, 4):
            t.log(step, {"reward": 0.5})
            t.log_samples(step, [Sample("1", "1", 1.0, "1")])
    kept = {"checkpoint/model.bin", "notes.txt", "samples/mine.txt", "tensorboard/profile.json"}
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    with tracker(tmp_path) as t:
        t.log(1, {"kl": 0.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "kl": 0.5}]
    assert len(lines(tmp_path / "timings.jsonl")) == 1
    assert (tmp_path / "config.yaml").read_text() == CONFIG
    events = {name for name in files(tmp_path) if "tfevents" in name}
    assert len(events) == 1
    assert files(tmp_path) - events == kept | {"config.yaml", "metrics.jsonl", "timings.jsonl"}  # no old picture


def test_a_file_is_no_run_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="run_dir must be a folder"), tracker(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


def test_an_error_passes_through_and_leaves_whole_files(tmp_path: Path) -> None:
    def failing_run() -> None:
        with tracker(tmp_path) as t:
            t.log(1, {"reward": 0.5})
            with t.phase("train"):
                raise RuntimeError("rank 3 is gone")

    with pytest.raises(RuntimeError, match="rank 3"):
        failing_run()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5}]
    assert imread(tmp_path / "reward.png").size


RUN_FOREVER = """
import sys
from pathlib import Path
from roll.pipelines.tracker import RunTracker, Sample
with RunTracker(Path(sys.argv[1]), config_yaml="a: 1", total_steps=10**6, title="endless", plot_every=2) as t:
    for step in range(1, 10**6):
        with t.phase("rollout"):
            t.log_samples(step, [Sample("p" * 5000, "r", 0.5, "a")])
        t.log(step, {"reward": 0.5, "kl": 0.1}, tokens=10)
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_whole_files(tmp_path: Path, ending: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_FOREVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:  # printed lines, flushed at once: stdout is no terminal
        if line.startswith("step 4/"):
            break
    process.send_signal(ending)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert "KeyboardInterrupt" in errors if ending == signal.SIGINT else process.returncode == -signal.SIGKILL
    steps = [record["step"] for record in lines(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 4
    assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")
    assert lines(tmp_path / "timings.jsonl")
    assert imread(tmp_path / "reward.png").size
    for path in (tmp_path / "samples").glob("step_*.jsonl"):
        assert lines(path)[0]["prompt"] == "p" * 5000
    if ending == signal.SIGINT:
        assert not [name for name in files(tmp_path) if name.endswith(".tmp")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "reward.png"
    replace_file(path, b"old")

    def interrupted(source: Path, target: Path) -> None:
        assert Path(source).read_bytes() == b"new" and target == path
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == {"reward.png"}


def test_each_line_is_in_the_file_before_the_next_step(tmp_path: Path) -> None:
    with tracker(tmp_path, plot_every=2) as t:
        for step in (1, 2, 3):
            t.log(step, {"reward": 0.5})
            assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
            assert len(lines(tmp_path / "timings.jsonl")) == step
            assert (tmp_path / "reward.png").exists() == (step >= 2)


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunTracker(tmp_path, config_yaml=CONFIG, total_steps=60, title="PPO on sums [x]") as t:
        with t.phase("rollout"):
            pass
        metrics = {"reward": 0.53125, "kl": 0.01, "entropy": 1.5, "loss": -0.25, "other": 9.0}
        t.log(12, metrics, tokens=100)
        t.note("saved [bold]model[/bold]")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"PPO on sums [x]: 60 steps, files in {tmp_path}"
    assert out[1].startswith("step 12/60  reward 0.5312  kl 0.01  entropy 1.5  loss -0.25  ")
    assert out[1].split("  ")[5].endswith(" tokens/s") and out[1].split("  ")[-1] == "rollout 0.0s"
    assert out[2] == "saved [bold]model[/bold]"  # no markup, no wrapping, no colour
    assert len(out) == 3
    assert "\x1b" not in "".join(out)


def test_plain_lines_are_flushed_at_once(tmp_path: Path) -> None:
    out = tmp_path / "job.log"
    with out.open("w") as file, tracker(tmp_path / "run", console=Console(file=file)) as t:
        t.log(1, {"reward": 0.5})
        assert "reward 0.5" in out.read_text()


def test_a_live_table_on_a_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})
    with tracker(tmp_path, console=console) as t:
        t.log(0, {"eval/exact_match": 0.25})
        t.log(1, {"reward": 0.75, "kl": 0.5}, tokens=10)
        with t.phase("rollout"):
            t.note("a line [x] that stays")
            t._display._live.refresh()  # type: ignore[attr-defined]
    written = console.file.getvalue()
    for text in ("PPO on sums", "step 1/3", "eval/exact_match", "0.25", "0.75", "tokens/s", "rollout"):
        assert text in written
    assert "a line [x] that stays" in written
    assert "\x1b[?25l" in written and written.rstrip().endswith("\x1b[?25h")  # the cursor is shown again


def test_a_live_table_keeps_measurements_but_no_loss_of_another_step(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})
    with tracker(tmp_path, console=console) as t:
        t.log(1, {"eval/exact_match": 0.25, "loss": 0.5})
        t.log(2, {"kl": 0.125})
        latest = t._display._latest  # type: ignore[attr-defined]
        assert latest == {"eval/exact_match": 0.25, "loss": None, "kl": 0.125}
        rendered = Console(file=io.StringIO(), width=100)
        rendered.print(t._display._render())  # type: ignore[attr-defined]
    assert re.search(r"0\.25 .* - .* 0\.125", rendered.file.getvalue())


def test_the_picture_has_two_curves_and_labelled_axes() -> None:
    figure = reward_figure("PPO", [(1, 0.5), (2, 0.75)], [(0, 0.25), (2, 0.5)])
    above, below = figure.axes
    assert above.lines[0].get_xydata().tolist() == [[1, 0.5], [2, 0.75]]
    assert below.lines[0].get_xydata().tolist() == [[0, 0.25], [2, 0.5]]
    assert (above.get_ylabel(), below.get_ylabel()) == ("mean reward", "exact match (held out)")
    assert below.get_xlabel() == "step" and above.get_title() == "PPO"
    (only,) = reward_figure("PPO", [(1, 0.5)], []).axes
    assert (only.get_xlabel(), only.get_ylabel()) == ("step", "mean reward")


def test_a_resumed_run_goes_on_behind_the_step_that_it_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with tracker(run, picture=LOSS_PICTURE) as t:
        for step, loss in enumerate((4.0, float("nan"), 2.0), start=1):
            t.log(step, {"loss": loss})
        with t.phase("save"):
            pass
    with tracker(run, picture=LOSS_PICTURE, resume_after=2) as t:
        assert str(t._curves["loss"]) == "[(1, 4.0), (2, nan)]"
        with pytest.raises(ValueError, match="step 2 was logged after step 2"):
            t.log(2, {"loss": 3.0})
        t.log(3, {"loss": 1.0})
    assert [(line["step"], line["loss"]) for line in lines(run / "metrics.jsonl")] == [(1, 4.0), (2, None), (3, 1.0)]
    assert [line["step"] for line in lines(run / "timings.jsonl")] == [1, 2, 3]
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")][::2] == [(1, 4.0), (3, 1.0)]
    assert (run / "loss.png").is_file() and not (run / "reward.png").exists()


def test_losses_share_their_axes() -> None:
    (ax,) = loss_figure("SFT", [(1, 3.0), (2, 2.0)], [(0, 4.0), (2, 2.5)]).axes
    assert [line.get_xydata().tolist() for line in ax.lines] == [[[1, 3.0], [2, 2.0]], [[0, 4.0], [2, 2.5]]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["training", "held out"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("step", "loss (nats per token)", "SFT")
