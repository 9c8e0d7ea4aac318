"""Settings of a small GRPO run."""

from __future__ import annotations

from roll.config import load_config
from roll.pipelines.rl_config import RLConfig
from tests.pipelines.small_run import EXAMPLES, SMALL

SMALL_GRPO = [each for each in SMALL if not each.startswith("algorithm.")]
"""Overrides of examples/grpo_cpu.yaml."""


def grpo_config(*overrides: str) -> RLConfig:
    """The example, made small, with overrides."""
    return load_config(RLConfig, EXAMPLES / "grpo_cpu.yaml", [*SMALL_GRPO, *overrides])
