"""Conversations in supervised runs: what is said of rows without a label, and of data that cannot be used."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from roll.config import ConfigError, SFTConfig, load_config
from roll.data.sources.tokenized_folder import write_tokenized
from roll.pipelines.sft_data import SFTData, load_sft_data
from roll.pipelines.sft_settings import shaping_settings
from tests.isolation import ROOT
from tests.pipelines.test_sft import EXAMPLE, SMALL, records, train
from tests.rank_pool import RankPool

LONG, SHORT = "a" * 12, "a"  # A prompt that fills a row of 8 tokens, and one that leaves room.


def conversations(folder: Path, prompts: list[str], name: str = "rows.jsonl") -> list[str]:
    """The settings of a run over these prompts, each answered by `b`."""
    rows = [{"prompt": prompt, "response": "b"} for prompt in prompts]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"data.files=[{folder / name}]", f"data.cache_dir={folder / 'cache'}"]
    return [*files, "data.kind=conversations", "data.held_out_share=0", "seq_len=8", "world_size=1"]


def load(*settings: str) -> SFTData:
    return load_sft_data(load_config(SFTConfig, EXAMPLE, [*SMALL, *settings]))


def test_samples_whose_prompt_fills_the_row_are_counted(tmp_path: Path) -> None:
    settings = conversations(tmp_path, [LONG, SHORT, LONG, "a" * 7, "a" * 8, SHORT])
    note = "3 of 6 samples to train on have no label: their prompts fill seq_len 8"
    assert load(*settings, "use_packed_dataset=false").notes[1:] == (note,)
    assert load(*settings).notes[1:] == (), "packs cut no label off"
    conversations(tmp_path, [LONG, SHORT], "held_out.jsonl")
    held_out = f"data.held_out_files=[{tmp_path}/held_out.jsonl]"
    there = "1 of 2 samples held out have no label: their prompts fill seq_len 8"
    assert load(*settings, held_out, "use_packed_dataset=false").notes[1::2] == (note, there)
    only_long = conversations(tmp_path, [LONG, LONG])
    with pytest.raises(
        ConfigError, match=r"^seq_len: 8 tokens are filled by the prompt of each of the 2 samples to tr"
    ):
        load(*only_long, "use_packed_dataset=false")


def test_what_is_not_read_is_noted(tmp_path: Path) -> None:
    for name, text in {"a.txt": "ab\n", "b.txt": "\n", "c.txt": "a\xe4b"}.items():
        (tmp_path / name).write_text(text)
    settings = [
        "data.held_out_share=0",
        f"data.files=[{tmp_path}/a.txt, {tmp_path}/b.txt]",
        f"data.held_out_files=[{tmp_path}/c.txt]",
    ]
    assert load(*settings).notes[2:] == (
        f"no text to read: {tmp_path}/b.txt is empty",
        "held out: 1 tokens are unknown to the tokenizer, and are not learned",
    )
    rows = conversations(tmp_path, [SHORT])
    assert load(*rows).notes[1:] == ()
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^\S*rows\.jsonl is empty: it holds no row$"):
        load(*rows)
    write_tokenized(tmp_path / "none.bin", [[], []])
    with pytest.raises(ConfigError, match=r"^data: the 2 samples to train on hold no token: \S*none\.bin$"):
        load("data.held_out_share=0", "data.kind=tokenized", f"data.files=[{tmp_path}/none.bin]")


def test_the_place_of_the_cache_does_not_shape_the_model(tmp_path: Path) -> None:
    one, other = (
        load_config(SFTConfig, EXAMPLE, [f"data.cache_dir={tmp_path / name}", f"output_dir={tmp_path / name}"])
        for name in ("a", "b")
    )
    assert shaping_settings(one) == shaping_settings(other)
    assert shaping_settings(one)["data"].keys() >= {"kind", "files"}


def test_a_step_without_a_label_is_skipped_and_said(ranks: RankPool, tmp_path: Path) -> None:
    settings = [*conversations(tmp_path, [LONG, SHORT]), "use_packed_dataset=false", "micro_bsz=1", "micro_num=1"]
    written = ranks.run(train, [*settings, f"output_dir={tmp_path}", "name=run"], world_size=1)[0]
    steps = records(tmp_path / "run")
    skipped = [record for record in steps if record["skipped_steps"]]
    assert len(steps) == 4 and len(skipped) == 2, "of two rows one has no label"
    for record in steps:
        if record["skipped_steps"]:
            assert record["labels"] == 0 and not record.keys() & {"loss", "grad_norm"}
            assert f"step {record['step']}: skipped, because none of its tokens is a label" in written
            (line,) = [line for line in written.splitlines() if line.startswith(f"step {record['step']}/4")]
            assert "loss" not in line and "lr" in line
        else:
            assert record["labels"] == 2 and record["loss"] > 0
    assert "1 of 2 samples to train on have no label" in written


def run_sft_command(monkeypatch: pytest.MonkeyPatch, *settings: str) -> int:
    """The exit status of examples/run_sft.py."""
    spec = importlib.util.spec_from_file_location("run_sft_example", ROOT / "examples" / "run_sft.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ["run_sft.py", "--config", str(EXAMPLE), *SMALL, *settings])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    status: int = module.main()
    return status


def test_wrong_rows_are_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = conversations(tmp_path, [SHORT])
    file = tmp_path / "rows.jsonl"
    for line, message in [
        (b'{"prompt": "\xe9", "response": "b"}', "is not UTF-8 text: byte 13 of it is 0xe9; convert the file to UTF-8"),
        (b'{"messages": "[]"}', ": messages must be a list of objects with role and content, got the text '[]'"),
        (b'["a", "b"]', "must be an object with messages, or prompt and response; it is ['a', 'b']"),
    ]:
        file.write_bytes(b'{"prompt": "a", "response": "b"}\n' + line)
        assert run_sft_command(monkeypatch, *settings, f"output_dir={tmp_path}", "name=run") == 2
        assert capsys.readouterr().err.replace("row 2:", "row 2 :") == f"{file} row 2 {message}\n"
    assert not (tmp_path / "run").exists()


def test_a_row_that_only_a_rank_reads_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_tokenized(tmp_path / "bad.bin", [[1, 999]] * 40)
    settings = ["data.kind=tokenized", f"data.files=[{tmp_path / 'bad.bin'}]", "data.held_out_share=0", "world_size=1"]
    assert run_sft_command(monkeypatch, *settings, f"output_dir={tmp_path}", "name=run") == 2
    told = [line for line in capfd.readouterr().err.splitlines() if "bad.bin" in line]
    assert len(told) == 1 and told[0].startswith(str(tmp_path / "bad.bin line"))
    assert told[0].endswith("token 1 has id 999, outside the vocabulary of 100")
