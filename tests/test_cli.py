"""What the commands say of a mistake: lines with the setting and no traceback; and what is no mistake keeps its own."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from roll.cli import exit_status
from roll.config import ConfigError, ModelConfig, Problem
from roll.data.packing import check_divides
from roll.errors import mistake

ROOT = Path(__file__).resolve().parents[1]
PPO, SFT = (str(ROOT / "examples" / name) for name in ("ppo_cpu.yaml", "sft_cpu.yaml"))


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """The exit status of a script in examples/, run in this process."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    status: int = runpy.run_path(str(ROOT / "examples" / script))["main"]()
    return status


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, *arguments: str
) -> list[str]:
    """The lines that a command says of a mistake."""
    assert run(monkeypatch, script, *arguments) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert said.out == ""
    return said.err.splitlines()


FILES: dict[str, tuple[bytes | None, str]] = {
    "not_there.yaml": (None, "there is no such config file"),
    ".": (None, "cannot be read: .*Is a directory"),
    "syntax.yaml": (b"name: [1, 2\nseed: 3", "cannot be read: .*line 2"),
    "tab.yaml": (b"name:\n\t- x", "cannot be read: "),
    "alias.yaml": (b"name: *nowhere", "cannot be read: .*undefined alias.*line 1"),
    "latin.yaml": ("name: \u00fc".encode("latin-1"), "cannot be read: "),
    "null.yaml": (b"name: \x00", "cannot be read: "),
    "list.yaml": (b"- 1", "must hold a mapping of settings"),
    "base.yaml": (b"extends: nothing.yaml", "there is no such config file"),
    "folder_base.yaml": (b"extends: .", "cannot be read: "),
    "file_base.yaml": (b"extends: base.yaml/x.yaml", "cannot be read: |no such config file"),
}


@pytest.mark.parametrize("script", ["run_ppo.py", "run_sft.py"])
@pytest.mark.parametrize("name", FILES)
def test_config_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, name: str
) -> None:
    (tmp_path / "base.yaml").write_text("extends: nothing.yaml")
    content, message = FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (line,) = refused(monkeypatch, capsys, script, "--config", str(tmp_path / name))
    assert line.startswith(str(tmp_path))
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed': must be dotted.path=value"),
        ("=3", "override '=3': must be"),
        ("a..b=3", "override 'a..b=3': must be"),
        ("seed=[", "override 'seed=[': cannot be read"),
        ("seed=${nowhere}", "seed: Interpolation key 'nowhere' not found"),
        ("seed=${oc.env:NO_SUCH_VARIABLE}", "seed: "),
        ("seed=${unclosed", "seed"),
        ("optimizer=3", "optimizer: must be a section of settings"),
        ("1=2", "1: "),
        ("optimizer.lr.x=3", "optimizer.lr"),
        ("parallel.tp[0]=2", "parallel.tp"),
    ],
)
def test_overrides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    lines = refused(monkeypatch, capsys, "run_sft.py", "--config", SFT, override)
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize("script", ["run_ppo.py", "run_sft.py"])
def test_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    config, name = (PPO, "ppo_cpu") if script == "run_ppo.py" else (SFT, "sft_cpu")
    (tmp_path / "file").write_text("")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / name).write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")

    def lines(folder: Path) -> list[str]:
        return refused(monkeypatch, capsys, script, "--config", config, f"output_dir={folder}")

    in_the_way = {
        "file": f"output_dir: {tmp_path}/file must be a folder, and is a file",
        "file/inside/it": f"output_dir: {tmp_path}/file must be a folder, and is a file",
        "runs": f"name: {tmp_path}/runs/{name} must be a folder, and is a file",
        "nowhere": f"output_dir: {tmp_path}/nowhere must be a folder, and is a file",
    }
    for folder, message in in_the_way.items():
        assert message in lines(tmp_path / folder)
    final = tmp_path / "runs" / name / "final"
    (tmp_path / "runs" / name).unlink()
    final.mkdir(parents=True)
    (final / "thesis.tex").write_text("")
    assert lines(tmp_path / "runs")[0].startswith(f"name: {final} holds thesis.tex, and is no model")
    # A process of root may write everywhere, so the system's answer is put in its place.
    readonly, asked = tmp_path / "readonly", os.access
    readonly.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != readonly and asked(path, mode))
    for folder in (readonly, readonly / "inside"):
        assert lines(folder)[0].startswith(f"output_dir: {readonly} may not be written to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere", "readonly", "runs"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.name=chain_sums"], "task: unknown task 'chain_sums'; near names: chain_sum"),
        (["task.params={min_word_len: 9, max_word_len: 3}"], "task: task spell_backward refuses params"),
        (["task.params={words: 3}"], "task: unknown param 'words' of task spell_backward"),
        (["task.prompt='{nothing}'"], "task: prompt template '{nothing}' uses nothing"),
        (["reward.function=no_such_module:f"], "reward.function 'no_such_module:f': cannot import module"),
        (["warm_start=null", "model_path=/nowhere"], "model_path: /nowhere: there is no such model folder"),
    ],
)
def test_what_a_ppo_run_asks_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    message: str,
) -> None:
    lines = refused(monkeypatch, capsys, "run_ppo.py", "--config", PPO, f"output_dir={tmp_path}", *overrides)
    assert any(line.startswith(message) for line in lines), lines
    assert not list(tmp_path.iterdir())


def test_a_dead_cluster_is_known_before_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.pipelines.small_run import SMALL
    from tests.workers.test_connection import closed_port

    address = closed_port()
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # The Ray of other tests in this process is none of ours.
    monkeypatch.setenv("RAY_ADDRESS", address)
    (line,) = refused(monkeypatch, capsys, "run_ppo.py", "--config", PPO, f"output_dir={tmp_path}", *SMALL)
    assert line.startswith(f"RAY_ADDRESS: no Ray cluster answers at '{address}'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "isp", "--tp", "2"], "tp: mode isp keeps it at 1, got 2"),
        (["--tp", "3"], "parallel.tp: 3 does not divide the model's num_attention_heads 8"),
        (["--seq-len", "0"], "--seq-len: must be at least 1, got 0"),
        (["--micro-bsz", "-1"], "--micro-bsz: must be at least 1, got -1"),
        (["--mode", "fsp", "--tp", "2", "--seq-len", "3", "--unpacked"], "3 tokens of a row do not split over 2 parts"),
        (["--model", "/nowhere"], "/nowhere: there is no such model folder"),
    ],
)
def test_inspecting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    lines = refused(monkeypatch, capsys, "inspect_model.py", *arguments)
    assert any(message in line for line in lines), lines


def raises(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    from roll.workers import WorkerFailed

    assert exit_status(lambda: None) == 0
    assert exit_status(raises(KeyboardInterrupt())) == 130
    assert exit_status(raises(ConfigError([Problem("a.b", "is wrong")]))) == 2
    assert exit_status(lambda: open("/nowhere/at/all").close()) == 2
    assert exit_status(raises(WorkerFailed("reward", 0, "Traceback of the rank", "score"))) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == ["a.b: is wrong", "/nowhere/at/all: No such file or directory", "reward rank 0 failed in score"]
    assert said[-1] == "Traceback of the rank"


def of(act: Callable[[], object]) -> str | None:
    try:
        act()
    except BaseException as error:  # noqa: BLE001
        return mistake(error)
    raise AssertionError("nothing was raised")


def test_only_what_a_user_can_mend_is_told_without_a_traceback() -> None:
    assert of(lambda: check_divides(3, 2)) == "3 tokens of a row do not split over 2 ranks of the sequence; 4 would fit"
    assert of(lambda: ModelConfig.from_folder("/nowhere")) == "/nowhere: there is no such model folder"
    assert of(lambda: int("x")) is None
    assert of(raises(ValueError("of a test"))) is None
    assert of(lambda: check_divides(3, 0)) is None  # ZeroDivisionError
    assert of(raises(RuntimeError("of ours"))) is None
    assert of(raises(ConnectionResetError(104, "reset by peer"))) is None


def test_errors_of_the_program_keep_their_traceback() -> None:
    for error in (ValueError("of a test"), ConnectionResetError("of ours"), AssertionError("cannot happen")):
        with pytest.raises(type(error), match=str(error)):
            exit_status(raises(error))


def test_ctrl_c_while_settings_are_read(tmp_path: Path) -> None:
    """The first thing that the command reads is a pipe that nobody writes to."""
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, str(ROOT / "examples" / "run_sft.py"), "--config", str(pipe)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with pipe.open("w"):  # Which waits until the command has opened it to read.
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "stopped" in output
    assert "Traceback" not in errors


def broken_rank(kind: str) -> None:
    """What a rank may end with."""
    if kind == "mistake":
        check_divides(3, 2)
    if kind == "file":
        Path("/nowhere/at/all").read_text()
    if kind == "gone":
        os._exit(3)
    raise ConnectionResetError("of ours")


@pytest.mark.slow
def test_a_mistake_that_a_rank_finds_is_told_in_a_line() -> None:
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    from roll.pipelines.local_ranks import run_on_ranks

    with pytest.raises(ConfigError, match=r"^3 tokens of a row do not split over 2 ranks"):
        run_on_ranks(broken_rank, "mistake", world_size=2)
    with pytest.raises(ConfigError, match=r"^/nowhere/at/all: No such file or directory$"):
        run_on_ranks(broken_rank, "file", world_size=1)
    with pytest.raises(ProcessRaisedException, match="ConnectionResetError: of ours"):
        run_on_ranks(broken_rank, "ours", world_size=1)
    with pytest.raises(ProcessExitedException, match="exit code 3"):
        run_on_ranks(broken_rank, "gone", world_size=1)
