"""Habits of all settings, and the settings that a user of the library builds by hand."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from roll import config as roll_config
from roll.config import (
    ConfigError,
    MicroBatchSettings,
    OptimizerSettings,
    ParallelSettings,
    Problem,
    Settings,
    SFTConfig,
    StrategySettings,
    load_config,
)
from roll.generation.batches import ROW_SEEDS_APART
from roll.pipelines.episodes import ROUND_SEEDS_APART
from roll.pipelines.rl import RLPipeline
from roll.pipelines.rl_config import RLConfig

SECTIONS = [value for value in vars(roll_config).values() if isinstance(value, type) and issubclass(value, Settings)]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_says_what_it_means(section: type[Settings]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no sentence under it"
        assert field.description.endswith("."), f"{section.__name__}.{name}: {field.description}"


def test_settings_are_frozen() -> None:
    settings = ParallelSettings()
    with pytest.raises(
        ConfigError, match=r"^tp: is not changed by assignment; build another ParallelSettings with tp=2$"
    ):
        settings.tp = 2  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"^pp: is not deleted"):
        del settings.pp
    assert settings == ParallelSettings()


VALUES: list[Any] = [None, -1, "no such thing", 2.5, [1], {"unknown": 1}, object()]


def refusals(section: type[Settings]) -> Iterator[ConfigError]:
    """What is said of wrong values of every setting, given by hand in two ways. No error but ours gets through."""
    wrong: list[dict[str, Any]] = [{name: value} for name in section.model_fields for value in VALUES]
    for values in [*wrong, {"no_such_setting": 1}]:
        for build in (lambda given: section(**given), section.model_validate):
            try:
                build(values)
            except ConfigError as error:
                yield error


@pytest.mark.parametrize("section", [section for section in SECTIONS if section is not Settings])
def test_what_is_built_by_hand_is_refused_in_the_words_of_a_config(section: type[Settings]) -> None:
    """Any wrong value of any setting: our own error, a line for each problem, and nothing of pydantic's."""
    said = list(refusals(section))
    assert len(said) > 2 * len(section.model_fields), "most of these values fit no setting"
    for error in said:
        assert str(error) == "\n".join(map(str, error.problems)) != ""
        for word in ("pydantic", "validation error", "Input should", "input_value", "type="):
            assert word not in str(error)
        assert error.__cause__ is None and error.__suppress_context__


def test_the_lines_are_those_of_the_loader(tmp_path: Path) -> None:
    given = {"mode": "isp", "cp": 2, "pp": 0, "wpp": 3, "cp_comm": "ring"}
    path = tmp_path / "parallel.yaml"
    path.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as loaded:
        load_config(ParallelSettings, path)
    with pytest.raises(ConfigError) as built:
        ParallelSettings(**given)
    with pytest.raises(ConfigError) as parsed:
        ParallelSettings.model_validate_json(path.read_text())
    assert str(built.value) == str(loaded.value) == str(parsed.value)
    assert [problem.path for problem in built.value.problems] == ["pp", "wpp", "cp", "cp_comm"]
    with pytest.raises(ConfigError, match=r"^Invalid JSON"):
        ParallelSettings.model_validate_json("{")
    # A section by hand within a whole by hand, and as a mapping: each problem under the path of its section.
    with pytest.raises(ConfigError, match=r"^parallel\.tp: must be greater than 0, got 0\noptimizer\.lrr: unknown"):
        StrategySettings(name="hf", model_path=tmp_path, parallel={"tp": 0}, optimizer={"lr": 1.0, "lrr": 1.0})  # type: ignore[arg-type]


def test_settings_travel(base: Path) -> None:
    config = load_config(RLConfig, base)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    error = pickle.loads(pickle.dumps(ConfigError([Problem("a.b", "is wrong"), Problem("c", "too")])))
    assert str(error) == "a.b: is wrong\nc: too"


def test_micro_batch_defaults() -> None:
    assert MicroBatchSettings().max_tokens == 16384
    assert MicroBatchSettings(rows=4).max_tokens is None
    assert MicroBatchSettings(max_tokens=9).rows is None
    with pytest.raises(ConfigError, match="got max_tokens 9 and rows 4"):
        MicroBatchSettings(rows=4, max_tokens=9)


def test_strategy_settings_by_hand(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optimizer: strategy 'megatron_train' needs it"):
        StrategySettings(name="megatron_train", model_path=tmp_path)
    with pytest.raises(ValueError, match="parallel: strategy 'hf' holds the model in one process, got tp 2"):
        StrategySettings(name="hf", model_path=tmp_path, parallel=ParallelSettings(tp=2))
    with pytest.raises(ValueError, match="name"):
        StrategySettings(name="vllm", model_path=tmp_path)  # type: ignore[arg-type]
    settings = StrategySettings(name="megatron_train", model_path=tmp_path, optimizer=OptimizerSettings(lr=1e-3))
    assert (settings.temperature, settings.dtype, settings.head, settings.init) == (1.0, "float32", "lm", "load")


def test_seeds_that_are_made_from_the_largest_seed_fit_torch(base: Path) -> None:
    largest = 2**31 - 1
    config = load_config(RLConfig, base, [f"seed={largest}", f"task.seed={largest}"])
    step = RLPipeline._seed(cast(RLPipeline, SimpleNamespace(config=config)), 10**6)
    torch.manual_seed(step + 2**20 * ROW_SEEDS_APART + 64 * ROUND_SEEDS_APART)
    with pytest.raises(ConfigError, match=r"^seed: must be less than 2147483648, got 2147483648$"):
        load_config(RLConfig, base, [f"seed={largest + 1}"])


def test_ppo_config_is_checked_without_a_file(base: Path) -> None:
    data = load_config(RLConfig, base).model_dump()
    assert RLConfig(**data).name == "base"
    data["task"]["train_size"] = 7
    with pytest.raises(ValueError, match=r"task\.train_size: 7 is less than prompts_per_step 8"):
        RLConfig(**data)


def test_strategy_settings_of_each_role(base: Path, tmp_path: Path) -> None:
    changes = [
        "temperature=0.7",
        "seed=5",
        "dtype=bfloat16",
        "algorithm.critic.micro_batch.rows=3",
        "batch_timeout_s=7.5",
    ]
    config = load_config(RLConfig, base, changes)
    sampled: dict[str, Any] = {"model_path": tmp_path, "seed": 5, "dtype": "bfloat16", "temperature": 0.7}
    sampled |= {"batch_timeout_s": 7.5}
    actor, critic = config.actor, config.algorithm.critic
    assert config.strategy_settings("actor", tmp_path) == StrategySettings(
        name="megatron_train", parallel=ParallelSettings(tp=2), optimizer=actor.optimizer, **sampled
    )
    assert config.strategy_settings("critic", tmp_path) == StrategySettings(
        name="megatron_train",
        head="value",
        micro_batch=MicroBatchSettings(rows=3),
        optimizer=critic.optimizer,
        **sampled,
    )
    assert config.strategy_settings("reference", tmp_path) == StrategySettings(name="megatron_infer", **sampled)
    with pytest.raises(ConfigError, match="rollout: ppo needs this role, and has no section of settings for it"):
        config.strategy_settings("rollout", tmp_path)


def test_examples_differ_in_the_degrees_of_the_actor_only() -> None:
    tensor, pipeline = (
        load_config(RLConfig, EXAMPLES / name).model_dump() for name in ("ppo_cpu.yaml", "ppo_cpu_pp2.yaml")
    )
    assert (tensor["actor"]["parallel"]["tp"], tensor["actor"]["parallel"]["pp"]) == (2, 1)
    assert (pipeline["actor"]["parallel"]["tp"], pipeline["actor"]["parallel"]["pp"]) == (1, 2)
    for config in (tensor, pipeline):
        del config["name"], config["actor"]["parallel"]["tp"], config["actor"]["parallel"]["pp"]
    assert tensor == pipeline


def test_ppo_starts_from_what_the_supervised_example_makes() -> None:
    ppo = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml")
    assert ppo.warm_start == load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml")
    assert ppo.warm_start.data.task == ppo.task
    elsewhere = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml", ["output_dir=some/where"])
    assert elsewhere.warm_start is not None and elsewhere.warm_start.run_dir == Path("some/where/sft_cpu")


def test_example_model_has_one_to_two_million_parameters() -> None:
    model = load_config(RLConfig, EXAMPLES / "ppo_cpu.yaml").architecture
    hidden, key_value = model.hidden_size, model.num_key_value_heads * model.head_dim
    attention = hidden * (hidden + 2 * key_value) + hidden * hidden
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    assert 1e6 <= model.num_hidden_layers * layer + 2 * model.vocab_size * hidden + hidden <= 2e6
