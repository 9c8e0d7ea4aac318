"""`~` in settings and arguments, and that no setting is a path of another type."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic.fields import FieldInfo

from roll import config as roll_config
from roll.config import (
    ConfigError,
    ModelConfig,
    ModelSource,
    Settings,
    SFTConfig,
    SFTDataSettings,
    StrategySettings,
    dump_config,
    expand_path,
    load_config,
)
from roll.config.paths import PathSetting, PatternsSetting
from roll.data import Paragraphs, TextFiles, TokenizedFolder
from roll.data.sources.tokenized_folder import write_tokenized
from roll.pipelines.rl_config import RLConfig
from roll.protocol import DataProto

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECTIONS = [value for value in vars(roll_config).values() if isinstance(value, type) and issubclass(value, Settings)]
SOUNDS_LIKE_A_PATH = re.compile(r"(^|_)(path|dir|folder|file)s?$")
MODEL = {
    "model_type": "internlm2",
    "bias": False,
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with nothing in it, and another working directory."""
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    return folder


def is_expanded(field: FieldInfo) -> bool:
    """Whether a setting has one of the two types of `roll.config.paths`."""
    options = [field.annotation, *get_args(field.annotation)]
    validators = {id(validator) for kind in (PathSetting, PatternsSetting) for validator in kind.__metadata__[1:]}
    marks = [mark for option in options for mark in getattr(option, "__metadata__", ())] + list(field.metadata)
    patterns = get_args(PatternsSetting)[0]
    return any(id(mark) in validators for mark in marks) or any(option == patterns for option in options)


def unexpanded(section: type[Settings]) -> list[str]:
    """The settings that are paths, by name or by type, and are not expanded."""
    return [
        f"{section.__name__}.{name}"
        for name, field in section.model_fields.items()
        if (SOUNDS_LIKE_A_PATH.search(name) or "Path" in str(field.annotation)) and not is_expanded(field)
    ]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_that_is_a_path_is_expanded(section: type[Settings]) -> None:
    assert unexpanded(section) == []


def test_paths_of_other_types_are_seen() -> None:
    class Bare(Settings):
        output_dir: str
        model_path: Path
        held_out_files: tuple[str, ...] = ()
        start: Path | None = None
        good_dir: PathSetting
        good_path: PathSetting | None = None
        good_files: PatternsSetting = ()
        profile: str = "not a file"

    bare = ["Bare.output_dir", "Bare.model_path", "Bare.held_out_files", "Bare.start"]
    assert unexpanded(Bare) == bare


def test_the_paths_of_a_ppo_run(home: Path) -> None:
    overrides = ["output_dir=~/runs", "warm_start=null", "model_path=~/model"]
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 2048}))
    (home / "mine.yaml").write_text(f"extends: {EXAMPLES / 'ppo_cpu.yaml'}\nname: from_home\n")
    Path("here.yaml").write_text("extends: ~/mine.yaml\n")
    for file in ("~/mine.yaml", Path("~/mine.yaml"), "here.yaml"):
        config = load_config(RLConfig, file, [*overrides, "actor.world_size=1", "actor.parallel.tp=1"])
        assert config.run_dir == home / "runs" / "from_home"
        assert config.model_path == home / "model"
        assert config.architecture.vocab_size == 32
        assert f"output_dir: {home}/runs\n" in dump_config(config)


def test_the_paths_of_a_supervised_run(home: Path) -> None:
    kept = load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml", ["output_dir=~/"])  # A bare ~ is YAML's null.
    assert kept.run_dir == home / "sft_cpu"
    data = SFTDataSettings(kind="text", files=("~/docs/**/*.md", "a~b", "./*.md"), held_out_files=("~",))
    assert data.files == (f"{home}/docs/**/*.md", "a~b", "./*.md")
    assert data.held_out_files == (str(home),)
    assert ModelSource(path="~/m").path == home / "m"  # type: ignore[arg-type]
    assert StrategySettings(name="hf", model_path=Path("~/m")).model_path == home / "m"


def test_variables_stay_and_interpolations_do_not(home: Path) -> None:
    for given, expected in {"$HOME/runs": Path("$HOME/runs"), "${oc.env:HOME}/runs": home / "runs"}.items():
        assert load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml", [f"output_dir={given}"]).output_dir == expected


def test_a_user_who_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_dir: '~nobody_of_that_name/runs' begins with ~, but there is no"):
        load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml", ["output_dir=~nobody_of_that_name/runs"])
    with pytest.raises(ConfigError, match=r"'~nobody_of_that_name/a.yaml' begins with ~"):
        load_config(SFTConfig, "~nobody_of_that_name/a.yaml")
    with pytest.raises(ValueError, match=r"data.files\.0|begins with ~"):
        SFTDataSettings(kind="text", files=("~nobody_of_that_name/*.md",))


def _config_json(path: str) -> None:
    expand_path(path).mkdir()
    (expand_path(path) / "config.json").write_text(json.dumps(MODEL))
    assert ModelConfig.from_folder(path).vocab_size == 32


def _batch(path: str) -> None:
    DataProto.from_dict({"x": torch.arange(3)}).save(path)
    assert DataProto.load(path)["x"].tolist() == [0, 1, 2]


def _tokenized(path: str) -> None:
    write_tokenized(f"{path}.bin", [[1, 2], [3]])
    assert len(TokenizedFolder(f"{path}.bin")) == 2


@pytest.mark.parametrize("use", [_config_json, _batch, _tokenized])
def test_functions_take_paths_of_the_home_folder(home: Path, use: Callable[[str], Any]) -> None:
    use("~/it")
    assert list(home.iterdir())
    assert not list(Path().iterdir())


@pytest.mark.parametrize("source", [Paragraphs, TextFiles])
def test_sources_name_the_whole_path_that_is_missing(home: Path, source: Callable[..., Any]) -> None:
    from roll.data.tokenizer import build_char_tokenizer

    with pytest.raises(ValueError, match=f"^{home}/none.jsonl is not a file"):
        source(["~/none.jsonl"], build_char_tokenizer())
