"""AdamW and its learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Strict

from roll.config.problems import Check, Problem
from roll.config.settings import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """AdamW with a warm-up and a schedule. Steps are optimizer steps."""

    lr: PositiveFloat
    """Learning rate after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of a linear or cosine schedule."""
    betas: Annotated[tuple[Beta, Beta], Strict(False)] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment, so that a step stays finite."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, of every weight but those of one dimension (norms)."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global L2 norm if theirs is larger."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine reach `min_lr` at `total_steps`."""
    total_steps: PositiveInt | None = None
    """Steps of the whole schedule, warm-up included; linear and cosine need it."""

    def checks(self) -> Iterable[Check]:
        return (self._min_lr_is_below_lr, self._schedule_has_an_end, self._warmup_fits)

    def _min_lr_is_below_lr(self) -> Iterator[Problem]:
        if self.min_lr > self.lr:
            yield Problem("min_lr", f"{self.min_lr} is above lr {self.lr}")

    def _schedule_has_an_end(self) -> Iterator[Problem]:
        if self.schedule != "constant" and self.total_steps is None:
            yield Problem("total_steps", f"schedule {self.schedule!r} needs it, got null")

    def _warmup_fits(self) -> Iterator[Problem]:
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            yield Problem("warmup_steps", f"{self.warmup_steps} is more than total_steps {self.total_steps}")
