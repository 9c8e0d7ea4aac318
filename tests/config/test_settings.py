"""Habits of all settings, and the settings that a user of the library builds by hand."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roll import config as roll_config
from roll.config import (
    ConfigError,
    MicroBatchSettings,
    OptimizerSettings,
    ParallelSettings,
    PPOConfig,
    Problem,
    Settings,
    SFTConfig,
    StrategySettings,
    load_config,
)

SECTIONS = [value for value in vars(roll_config).values() if isinstance(value, type) and issubclass(value, Settings)]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_says_what_it_means(section: type[Settings]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no sentence under it"
        assert field.description.endswith("."), f"{section.__name__}.{name}: {field.description}"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ParallelSettings().tp = 2  # type: ignore[misc]


def test_settings_travel(base: Path) -> None:
    config = load_config(PPOConfig, base)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    error = pickle.loads(pickle.dumps(ConfigError([Problem("a.b", "is wrong"), Problem("c", "too")])))
    assert str(error) == "a.b: is wrong\nc: too"


def test_micro_batch_defaults() -> None:
    assert MicroBatchSettings().max_tokens == 16384
    assert MicroBatchSettings(rows=4).max_tokens is None
    assert MicroBatchSettings(max_tokens=9).rows is None
    with pytest.raises(ValidationError, match="got max_tokens 9 and rows 4"):
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


def test_ppo_config_is_checked_without_a_file(base: Path) -> None:
    data = load_config(PPOConfig, base).model_dump()
    assert PPOConfig(**data).name == "base"
    data["task"]["train_size"] = 7
    with pytest.raises(ValueError, match=r"task\.train_size: 7 is less than ppo.prompts_per_step 8"):
        PPOConfig(**data)


@pytest.mark.parametrize(("delivery", "rows_on"), [("object_store", "every_rank"), ("broadcast", "leader")])
def test_strategy_settings_of_each_role(base: Path, tmp_path: Path, delivery: str, rows_on: str) -> None:
    changes = ["temperature=0.7", "seed=5", "dtype=bfloat16", "critic.micro_batch.rows=3", "batch_timeout_s=7.5"]
    config = load_config(PPOConfig, base, [*changes, f"ray.delivery={delivery}"])
    alone: dict[str, Any] = {"model_path": tmp_path, "seed": 5, "dtype": "bfloat16", "temperature": 0.7}
    sampled = {**alone, "rows_on": rows_on, "batch_timeout_s": 7.5}
    actor, critic = config.actor, config.critic
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
    assert config.strategy_settings("rollout", tmp_path) == StrategySettings(name="hf", **alone)


def test_examples_differ_in_the_degrees_of_the_actor_only() -> None:
    tensor, pipeline = (
        load_config(PPOConfig, EXAMPLES / name).model_dump() for name in ("ppo_cpu.yaml", "ppo_cpu_pp2.yaml")
    )
    assert (tensor["actor"]["parallel"]["tp"], tensor["actor"]["parallel"]["pp"]) == (2, 1)
    assert (pipeline["actor"]["parallel"]["tp"], pipeline["actor"]["parallel"]["pp"]) == (1, 2)
    for config in (tensor, pipeline):
        del config["name"], config["actor"]["parallel"]["tp"], config["actor"]["parallel"]["pp"]
    assert tensor == pipeline


def test_ppo_starts_from_what_the_supervised_example_makes() -> None:
    ppo = load_config(PPOConfig, EXAMPLES / "ppo_cpu.yaml")
    assert ppo.warm_start == load_config(SFTConfig, EXAMPLES / "sft_cpu.yaml")
    assert ppo.warm_start.data.task == ppo.task
    elsewhere = load_config(PPOConfig, EXAMPLES / "ppo_cpu.yaml", ["output_dir=some/where"])
    assert elsewhere.warm_start is not None and elsewhere.warm_start.run_dir == Path("some/where/sft_cpu")


def test_example_model_has_one_to_two_million_parameters() -> None:
    model = load_config(PPOConfig, EXAMPLES / "ppo_cpu.yaml").architecture
    hidden, key_value = model.hidden_size, model.num_key_value_heads * model.head_dim
    attention = hidden * (hidden + 2 * key_value) + hidden * hidden
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    assert 1e6 <= model.num_hidden_layers * layer + 2 * model.vocab_size * hidden + hidden <= 2e6
