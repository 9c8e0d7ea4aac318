"""A small, valid PPO config as a file, and what loading it with overrides complains about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import pytest

from roll.config import ConfigError, load_config
from roll.pipelines.rl_config import RLConfig
from tests.config.small_model import MODEL

BASE = """
name: base
warm_start:
  name: made
  model: MODEL
  data: {kind: text, files: [a.txt]}
  seq_len: 64
  steps: 5
  optimizer: {lr: 1e-3}
task: {max_prompt_tokens: 40, train_size: 100, eval_size: 10}
steps: 3
prompts_per_step: 8
responses_per_prompt: 3
mini_batch_size: 12
algorithm:
  name: ppo
  kl: {kind: adaptive, coef: 0.1, target: 0.5}
  critic: {optimizer: {lr: 1e-4}}
actor: {world_size: 2, parallel: {tp: 2}, optimizer: {lr: 1e-4}}
rollout: {max_new_tokens: 8}
""".replace("MODEL", indent(MODEL, "  "))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


@pytest.fixture
def complaints(base: Path) -> Callable[..., list[str]]:
    """The lines of the ConfigError that overrides of the base config lead to."""

    def lines(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(RLConfig, base, overrides)
        assert str(caught.value).splitlines() == [str(problem) for problem in caught.value.problems]
        return str(caught.value).splitlines()

    return lines
