"""How a run continues from a checkpoint: the settings of the run hold, the progress is the checkpoint's.

A checkpoint says beside its tensors how many optimizer steps it has seen, and under which settings. The settings are
kept for one reason, to name what has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from roll.config import OptimizerSettings

logger = logging.getLogger(__name__)


def progress_of(settings: OptimizerSettings, steps: int) -> dict[str, Any]:
    """Entry of a checkpoint: `steps` taken, and the settings under which the last one was."""
    return {"steps": steps, "settings": settings.model_dump(mode="json")}


def continued_steps(checkpoint: Mapping[str, Any], settings: OptimizerSettings, *, speaks: bool = True) -> int:
    """Steps that the checkpoint has seen. Called before anything is replaced.

    Args:
        checkpoint: what was loaded; its entry `progress` is from `progress_of`.
        settings: those of this run.
        speaks: whether this rank logs a warning that names each changed setting, old and new.
    """
    progress = checkpoint["progress"]
    changes = changed_settings(progress["settings"], settings)
    if changes and speaks:
        logger.warning("optimizer settings of this run replace the checkpoint's: %s", "; ".join(changes))
    return int(progress["steps"])


def changed_settings(saved: dict[str, Any], settings: OptimizerSettings) -> list[str]:
    """Settings that differ, each as `name old -> new`."""
    own = settings.model_dump(mode="json")
    return [f"{name} {saved.get(name)} -> {value}" for name, value in own.items() if saved.get(name) != value]


def end_of_schedule(settings: OptimizerSettings) -> int | None:
    """First step (from 0) behind the end of a schedule that decays to 0; None for other schedules."""
    if settings.schedule == "constant" or settings.min_lr > 0:
        return None
    assert settings.total_steps is not None  # The settings refuse these schedules without it.
    return max(settings.total_steps, settings.warmup_steps + 1)


def rate_zero_message(settings: OptimizerSettings, step: int) -> str:
    """Sentence that says why step `step` (from 0) and all behind it change nothing, and what to do."""
    return (
        f"optimizer step {step + 1} and all behind it have learning rate 0: schedule {settings.schedule} ended at "
        f"total_steps {settings.total_steps} with min_lr {settings.min_lr}. A larger total_steps or min_lr goes on."
    )


class EndOfSchedule:
    """Warning that training goes on behind the end of a schedule that decays to 0, given once."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._end = end_of_schedule(settings)

    def check(self, step: int) -> None:
        """Warn if step `step` (from 0) changes nothing. The first step of a warm-up has rate 0 too, by design."""
        if self._end is not None and step >= self._end:
            logger.warning(rate_zero_message(self._settings, step))
            self._end = None
