"""Each refusal of a supervised run's config, word by word, and what it derives for the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.config import ConfigError, SFTConfig, dump_config, load_config
from tests.config.small_model import MODEL

BASE = """
name: base
model: MODEL
data: {kind: text, files: [a.txt], held_out_share: 0.1}
micro_bsz: 2
seq_len: 32
micro_num: 4
world_size: 2
optimizer: {lr: 1e-3}
steps: 3
""".replace("MODEL", MODEL)

REFUSALS = {
    "model.trust_remote_code=true": [
        "model.trust_remote_code: must be false where there is no path: there is no code to run"
    ],
    "seq_len=65": ["seq_len: 65 is over the model's context of 64 tokens"],
    "seq_len=33 micro_bsz=1 parallel={mode: isp, sp: 2, wp: 2}": [
        "seq_len: micro_bsz 1 x seq_len 33 = 33 is not a multiple of the 2 parts of the sequence, "
        "parallel.sp 2 of mode isp"
    ],
    # Two such rows are a pack that divides, but without packing each row is split.
    "seq_len=33 use_packed_dataset=false parallel={mode: isp, sp: 2, wp: 2}": [
        "seq_len: 33 is not a multiple of the 2 parts of the sequence, parallel.sp 2 of mode isp"
    ],
    "world_size=3 parallel.tp=2": ["world_size: 3 is not a multiple of parallel.tp 2 x pp 1 x cp 1 = 2"],
    "world_size=4 parallel.pp=4": ["parallel.pp: 4 does not divide the model's num_hidden_layers 6; 3 would fit"],
    "ramp_up={start: 5, increment: 1, every: 10}": ["ramp_up.start: 5 is over micro_num 4"],
    "data.held_out_files=[b.txt]": ["data.held_out_share: must be 0 where there are held_out_files, got 0.1"],
    "data.files=[]": ["data.files: kind 'text' needs at least one"],
    "data.task={max_prompt_tokens: 9, train_size: 9, eval_size: 9}": [
        "data.task: must be null, because kind is 'text'"
    ],
    "data.kind=task": [
        "data.task: kind 'task' needs it, got null",
        "data.files: must not be set, because kind is 'task'",
        "data.held_out_share: must not be set, because kind is 'task'",
    ],
    "model={path: runs/base/final, config: null}": [
        "model.path: runs/base/final: there is no such model folder",
        "name: model.path 'runs/base/final' lies in the folder of this run, which replaces it",
    ],
    "model={path: nowhere, config: null}": ["model.path: nowhere: there is no such model folder"],
    # Everything at once, and the nearest name.
    "steps=0 parallel.tpp=2 seq_len=128": [
        "parallel.tpp: unknown setting; did you mean parallel.tp?",
        "steps: must be greater than 0, got 0",
        "seq_len: 128 is over the model's context of 64 tokens",
    ],
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def overrides_of(text: str) -> list[str]:
    """`a=1 b={c: 2, d: 3}` in its parts: a space in front of a name ends a value."""
    parts: list[str] = []
    for word in text.split(" "):
        if "=" in word:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts


@pytest.mark.parametrize("changes", REFUSALS)
def test_a_refusal_names_the_setting_and_the_values(base: Path, changes: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(SFTConfig, base, overrides_of(changes))
    assert sorted(str(caught.value).splitlines()) == sorted(REFUSALS[changes])


def test_a_config_survives_its_own_dump(base: Path, tmp_path: Path) -> None:
    config = load_config(SFTConfig, base, ["alphabet=ab${oc.env:HOME}", "ramp_up={start: 1, increment: 1, every: 2}"])
    (tmp_path / "dumped.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(SFTConfig, tmp_path / "dumped.yaml") == config


def test_the_strategy_loads_a_folder_and_draws_an_architecture(base: Path) -> None:
    config = load_config(SFTConfig, base, ["parallel.tp=2"])
    settings = config.strategy_settings(Path("somewhere"))
    assert (settings.init, settings.parallel.tp, settings.optimizer) == ("random", 2, config.optimizer)
