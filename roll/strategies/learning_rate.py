"""The learning rate schedule in closed form, for strategies without Megatron-Core's scheduler."""

from __future__ import annotations

from math import cos, pi

from roll.config import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of optimizer step `step` (from 0): a linear warm-up from 0, then constant, linear or cosine decay."""
    if settings.warmup_steps and step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    assert settings.total_steps is not None  # The settings refuse these schedules without it.
    total = max(settings.total_steps, settings.warmup_steps + 1)
    done = min(1.0, (step - settings.warmup_steps) / (total - settings.warmup_steps))
    share = 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + cos(pi * done))
    return settings.min_lr + share * (settings.lr - settings.min_lr)
