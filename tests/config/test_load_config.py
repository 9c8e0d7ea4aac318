"""Reading YAML and overrides: types, unknown names, files that extend others, and all problems at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Strict

from roll.config import ConfigError, Settings, dump_config, load_config
from roll.pipelines.rl_config import RLConfig

Complaints = Callable[..., list[str]]


class Inner(Settings):
    size: int = 1
    """A size."""
    text: str = ""
    """A text."""


class Outer(Settings):
    rate: float = 0.5
    """A rate."""
    pair: Annotated[tuple[int, int], Strict(False)] | None = None
    """Two numbers, or none."""
    inner: Inner = Inner()
    """A section."""
    free: dict[str, Any] = {}  # noqa: RUF012
    """Any settings."""


def load_text(tmp_path: Path, text: str, *overrides: str) -> Outer:
    path = tmp_path / "outer.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(Outer, path, overrides)


def error_of(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, *overrides)
    return str(caught.value)


def test_overrides_are_yaml_values(base: Path) -> None:
    config = load_config(
        RLConfig,
        base,
        [
            "actor.optimizer.lr=2e-5",
            "actor.optimizer.betas=[0.8, 0.99]",
            "algorithm.value_clip=null",
            "algorithm.whiten_advantages=false",
            "task.params={min_terms: 2, max_terms: 3}",
            "task.params.max_terms=4",
            "output_dir=some/where",
            "task.prompt='{question} ='",
            "steps=7",
            "steps=8",
        ],
    )
    assert config.actor.optimizer.lr == 2e-5
    assert config.actor.optimizer.betas == (0.8, 0.99)
    assert config.algorithm.value_clip is None
    assert config.algorithm.whiten_advantages is False
    assert config.task.params == {"min_terms": 2, "max_terms": 4}
    assert config.run_dir == Path("some/where/base")
    assert config.task.prompt == "{question} ="
    assert config.steps == 8
    assert config.algorithm.critic.optimizer.lr == 1e-4, "what is not overridden stays"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("steps='3'", "steps: must be a valid integer, got '3'"),
        ("steps=3.5", "steps: must be a valid integer, got 3.5"),
        ("steps=true", "steps: must be a valid integer, got true"),
        ("steps=", "steps: must be a valid integer, got null"),
        ("steps=0", "steps: must be greater than 0, got 0"),
        ("steps.more=1", "steps: must be a valid integer, got {'more': 1}"),
        ("algorithm.gamma=1.1", "algorithm.gamma: must be less than or equal to 1, got 1.1"),
        ("algorithm.clip_high=.inf", "algorithm.clip_high: must be a finite number, got inf"),
        ("name=5", "name: must be a valid string, got 5"),
        ("output_dir=5", "output_dir: must be a path, got 5"),
        ("dtype=float16", "dtype: must be 'float32' or 'bfloat16', got 'float16'"),
        ("actor.optimizer.betas=[0.9, 1.5]", "actor.optimizer.betas.1: must be less than 1, got 1.5"),
        ("algorithm.critic.micro_batch={rows: 0}", "algorithm.critic.micro_batch.rows: must be greater than 0, got 0"),
        ("task=5", "task: must be a section of settings, got 5"),
        ("task.params=5", "task.params: must be a valid dictionary, got 5"),
    ],
)
def test_wrong_types(complaints: Complaints, override: str, line: str) -> None:
    assert complaints(override) == [line]


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("actor.parallel.tpp", "actor.parallel.tp"),
        ("actor.paralel", "actor.parallel"),
        ("actor.lr", "actor.optimizer.lr"),
        ("algorithm.critic.lr", "algorithm.critic.optimizer.lr"),
        ("algorithm.max_new_tokens", "rollout.max_new_tokens"),
        ("algorithm.kl.coeff", "algorithm.kl.coef"),
        ("warm_start.micro_size", "warm_start.micro_bsz"),
        ("warm_start.model.config.n_layers", "warm_start.model.config.num_hidden_layers"),
        ("temprature", "temperature"),
        ("actro", "actor"),
    ],
)
def test_unknown_settings_name_the_nearest(complaints: Complaints, base: Path, path: str, nearest: str) -> None:
    line = f"{path}: unknown setting; did you mean {nearest}?"
    assert complaints(f"{path}=1") == [line]
    assert complaints(f"{path}.below=1") == [line]

    text = "1"
    for part in reversed(path.split(".")):
        text = f"{{{part}: {text}}}"
    child = base.parent / "child.yaml"
    child.write_text(f"{{extends: base.yaml, {text[1:]}", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, child)
    assert str(caught.value) == line


def test_all_problems_at_once(complaints: Complaints) -> None:
    assert complaints(
        "not_an_override",
        "actor.parallel.tpp=2",
        "steps=0",
        "mini_batch_size=10",
        "algorithm.kl.target=null",
        "actor.parallel.pp=4",
        "rollout.engine={name: vllm}",
        "rollout.max_new_tokens=30",
        "algorithm.critic.optimizer={lr: 1.0, schedule: linear}",
        "output_dir=${nowhere}",
        "model_path=there",
    ) == [
        "override 'not_an_override': must be dotted.path=value",
        "output_dir: Interpolation key 'nowhere' not found",
        "steps: must be greater than 0, got 0",
        "actor.parallel.tpp: unknown setting; did you mean actor.parallel.tp?",
        "rollout.engine.name: must be 'transformers', or module:Name of an engine of your own, got 'vllm'",
        "model_path: exactly one of model_path and warm_start must be set, the other null; "
        "got model_path 'there' and a warm_start",
        "actor.parallel.pp: 4 does not divide the model's num_hidden_layers 6; 3 would fit",
        "actor.world_size: 2 is not a multiple of parallel.tp 2 x pp 4 x cp 1 = 8",
        "task.max_prompt_tokens: task.max_prompt_tokens 40 + rollout.max_new_tokens 30 = 70, "
        "exceeds the model's max_position_embeddings 64",
        "mini_batch_size: 10 does not divide prompts_per_step 8 x responses_per_prompt 3 = 24 rows",
        "algorithm.critic.optimizer.total_steps: schedule 'linear' needs it, got null",
        "algorithm.kl.target: kind 'adaptive' needs it, got null",
    ]


def test_an_unusable_setting_skips_only_its_own_checks(complaints: Complaints) -> None:
    wrong = "must be a valid integer, got 'x'"
    assert complaints("actor.parallel.tp=x", "actor.parallel.pp=4", "task.train_size=7") == [
        f"actor.parallel.tp: {wrong}",
        "actor.parallel.pp: 4 does not divide the model's num_hidden_layers 6; 3 would fit",
        "task.train_size: 7 is less than prompts_per_step 8",
    ]
    assert complaints("warm_start.model.config.num_hidden_layers=x", "actor.parallel.tp=8", "actor.world_size=8") == [
        f"warm_start.model.config.num_hidden_layers: {wrong}",
        "actor.parallel.tp: 8 does not divide the model's num_key_value_heads 4; 4 would fit",
    ]
    assert complaints("algorithm.critic.micro_batch.rows=${gone}", "algorithm.critic.micro_batch.max_tokens=null") == [
        "algorithm.critic.micro_batch.rows: Interpolation key 'gone' not found"
    ]
    assert complaints("task=5", "rollout.world_size=5")[0] == "task: must be a section of settings, got 5"


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(RLConfig, path)
    required = ["steps", "prompts_per_step", "mini_batch_size", "name", "task", "algorithm", "actor", "rollout"]
    missing = [f"{name}: this setting is required, but not given" for name in required]
    one = "model_path: exactly one of model_path and warm_start must be set, the other null; got neither"
    assert str(caught.value).splitlines() == [*missing, one]


@pytest.mark.parametrize("override", ["rate", "=1", ".=1", "inner..size=1", "--verbose", ""])
def test_malformed_overrides(tmp_path: Path, override: str) -> None:
    assert error_of(tmp_path, "", override) == f"override {override!r}: must be dotted.path=value"


def test_override_that_is_not_yaml(tmp_path: Path) -> None:
    assert error_of(tmp_path, "", "pair=[1").startswith("override 'pair=[1': cannot be read: while parsing")
    assert error_of(tmp_path, "", "inner.text=${").startswith("override 'inner.text=${': cannot be read: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "must hold a mapping of settings, got a list"),
        ("5", "cannot be read: Invalid loaded object type: int"),
        ("extends: ${gone}", "cannot be read: Interpolation key 'gone' not found full_key: extends"),
        ("rate: [", "cannot be read: while parsing"),
        ("rate: 1\nrate: 2", "cannot be read: while constructing a mapping"),
        ("inner: {text: '${'}", "cannot be read: no viable alternative at input '${' full_key: inner.text"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    assert error_of(tmp_path, text).startswith(f"{tmp_path / 'outer.yaml'}: {message}")


def test_a_file_of_words_is_an_unknown_setting(tmp_path: Path) -> None:
    assert error_of(tmp_path, "just words").startswith("just words: unknown setting")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, tmp_path / "no.yaml")
    assert str(caught.value) == f"{tmp_path / 'no.yaml'}: there is no such config file"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Outer, tmp_path)


def test_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_TEST_SIZE", "from the environment")
    outer = load_text(
        tmp_path, "rate: 0.25\ninner: {size: 3, text: 'r=${rate}'}\nfree: ${inner}\npair: ['${inner.size}', 2]"
    )
    assert outer == Outer(
        rate=0.25, pair=(3, 2), inner=Inner(size=3, text="r=0.25"), free={"size": 3, "text": "r=0.25"}
    )
    assert load_text(tmp_path, "inner: {text: '${oc.env:ROLL_TEST_SIZE}'}").inner.text == "from the environment"
    # An override takes part in the interpolation.
    assert load_text(tmp_path, "rate: 0.25\nfree: {twice: '${rate}'}", "rate=4").free == {"twice": 4}


def test_bad_interpolations_are_all_reported(tmp_path: Path) -> None:
    text = "rate: ${gone}\ninner: {size: '???', text: '${oc.env:ROLL_NO_SUCH_VARIABLE}'}\n"
    text += "free: {a: '${free.a}', b: ['${no:1}']}"
    assert error_of(tmp_path, text).splitlines() == [
        "rate: Interpolation key 'gone' not found",
        "inner.size: Missing mandatory value: inner.size",
        "inner.text: KeyError raised while resolving interpolation: "
        "\"Environment variable 'ROLL_NO_SUCH_VARIABLE' not found\"",
        "free.a: Recursive interpolation detected",
        "free.b.0: Unsupported interpolation type no",
    ]


def test_extends(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "base.yaml").write_text("rate: 0.1\npair: [1, 2]\ninner: {size: 5, text: '${rate}'}", encoding="utf-8")
    (tmp_path / "below" / "middle.yaml").write_text("extends: ../base.yaml\ninner: {size: 6}", encoding="utf-8")
    (tmp_path / "below" / "top.yaml").write_text("extends: middle.yaml\nrate: 0.2\npair: [3, 4]", encoding="utf-8")
    outer = load_config(Outer, tmp_path / "below" / "top.yaml", ["inner.text=x${rate}"])
    assert outer == Outer(rate=0.2, pair=(3, 4), inner=Inner(size=6, text="x0.2"))


def test_a_section_may_extend_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "inner.yaml").write_text("extends: other.yaml\ntext: r=${rate}", encoding="utf-8")
    (tmp_path / "below" / "other.yaml").write_text("size: 7\ntext: gone", encoding="utf-8")
    text = "rate: 0.25\ninner: {extends: below/inner.yaml}\nfree: {a: {extends: below/other.yaml, size: '${.text}'}}"
    outer = load_text(tmp_path, text, "rate=0.5", "inner.size=8")
    assert outer == Outer(rate=0.5, inner=Inner(size=8, text="r=0.5"), free={"a": {"size": "gone", "text": "gone"}})


def test_extends_refusals(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("extends: two.yaml", encoding="utf-8")
    two.write_text("extends: one.yaml", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, one)
    assert str(caught.value) == f"{one}: extends itself: {one} -> {two} -> {one}"

    two.write_text("inner: {extends: one.yaml}", encoding="utf-8")
    with pytest.raises(ConfigError, match="extends itself"):
        load_config(Outer, two)

    two.write_text("extends: gone.yaml", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, one)
    assert str(caught.value) == f"{tmp_path / 'gone.yaml'}: there is no such config file, which {two} extends"

    two.write_text("extends: [a.yaml]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"extends: must be the name of a file, got \['a.yaml'\]"):
        load_config(Outer, one)


def test_dump_reads_back(base: Path, tmp_path: Path) -> None:
    config = load_config(RLConfig, base, ["task.params={min_terms: 2}", "task.prompt='{question} \\${x}'"])
    assert config.task.prompt == "{question} ${x}"
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_config(config), encoding="utf-8")
    assert load_config(RLConfig, copy) == config
    assert "parallel_output: true" in copy.read_text(encoding="utf-8"), "defaults are written out"


@pytest.mark.parametrize(
    "text", ["${x}", r"\${x}", r"\\${x}", r"a\b ${x} \\", "${", "1e-5", "null", "yes", "2024-01-01", " "]
)
def test_dump_reads_back_text_that_could_be_something_else(tmp_path: Path, text: str) -> None:
    outer = Outer(inner=Inner(text=text))
    assert load_text(tmp_path, dump_config(outer)) == outer


def readable_text() -> st.SearchStrategy[str]:
    """Any text but OmegaConf's own `???`, which means that a value is missing."""
    hard = st.sampled_from(["${x}", "\\", "$", "{", "}", "'", '"', ": ", "#", "1e-5", "null", "yes", "\n", "=", "${"])
    texts = st.lists(hard | st.text(st.characters(codec="utf-8"), max_size=3), max_size=6)
    return texts.map("".join).filter(lambda text: text != "???")


@settings(deadline=None)
@given(
    rate=st.floats(allow_nan=False, allow_infinity=False),
    size=st.integers(),
    pair=st.none() | st.tuples(st.integers(), st.integers()),
    text=readable_text(),
    free=st.dictionaries(st.text("abc", min_size=1), st.integers() | st.floats(allow_nan=False) | readable_text()),
)
def test_dump_reads_back_whatever_the_values(
    tmp_path_factory: pytest.TempPathFactory,
    rate: float,
    size: int,
    pair: tuple[int, int] | None,
    text: str,
    free: dict[str, Any],
) -> None:
    outer = Outer(rate=rate, pair=pair, inner=Inner(size=size, text=text), free=free)
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(outer), encoding="utf-8")
    assert load_config(Outer, path) == outer


def test_import_loads_neither_torch_nor_ray() -> None:
    code = "import sys, roll.config; print([name for name in ('torch', 'ray', 'megatron') if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"
