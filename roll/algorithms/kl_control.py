"""The weight of a KL penalty: its settings, and the controllers that hold it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from pydantic import NonNegativeFloat, PositiveFloat

from roll.config.problems import Check, Problem
from roll.config.settings import Settings
from roll.errors import UserError

KLEstimator = Literal["k1", "k2", "k3", "abs"]
KLControllerKind = Literal["fixed", "adaptive"]


class KLSettings(Settings):
    """The penalty for leaving the reference, subtracted from each token's reward."""

    kind: KLControllerKind = "fixed"
    """Whether the weight stays `coef`, or follows the measured KL towards `target`."""
    coef: NonNegativeFloat
    """Weight of the penalty (of the first step, if adaptive). 0: no penalty, no reference, and no `kl` is measured."""
    target: PositiveFloat | None = None
    """KL that an adaptive weight steers to; a fixed one ignores it."""
    horizon: PositiveFloat = 10000
    """Responses over which an adaptive weight changes by its relative error; a fixed one ignores it."""
    estimator: KLEstimator = "k1"
    """Estimator of KL from the log-probabilities of the sampled tokens."""

    @property
    def penalises(self) -> bool:
        """Whether there is a penalty, and so a reference."""
        return self.coef > 0

    def checks(self) -> Iterable[Check]:
        return (self._adaptive_has_a_target, self._adaptive_can_grow)

    def _adaptive_has_a_target(self) -> Iterator[Problem]:
        if self.kind == "adaptive" and self.target is None:
            yield Problem("target", "kind 'adaptive' needs it, got null")

    def _adaptive_can_grow(self) -> Iterator[Problem]:
        if self.kind == "adaptive" and self.coef == 0:
            yield Problem("coef", f"kind 'adaptive' scales it, so it must be above 0, got {self.coef}")


class KLController(ABC):
    """Holds the weight of the KL penalty, `value`, over the steps of a run."""

    kind: KLControllerKind

    def __init__(self, coef: float) -> None:
        if not (math.isfinite(coef) and coef >= 0):
            raise UserError(f"kl.coef must be a finite number of at least 0, got {coef}")
        self._coef = coef

    @property
    def value(self) -> float:
        return self._coef

    @abstractmethod
    def update(self, kl: float, num_samples: int) -> None:
        """Take in the mean KL of `num_samples` responses that were just trained on."""

    @abstractmethod
    def state_dict(self) -> dict[str, float | str]:
        """What a checkpoint keeps. Settings are not state: they come from the run's config again."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, float | str]) -> None:
        """Continue from `state`. Raises ValueError if it is of a controller of another kind, or no usable weight."""

    def _check_kind(self, state: dict[str, float | str]) -> None:
        if state["kind"] != self.kind:
            raise UserError(f"kl.kind is {self.kind!r}, but the state is of a controller of kind {state['kind']!r}")


class FixedKLController(KLController):
    """The weight stays what the config says."""

    kind: KLControllerKind = "fixed"

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float | str]:
        return {"kind": self.kind}

    def load_state_dict(self, state: dict[str, float | str]) -> None:
        self._check_kind(state)


class AdaptiveKLController(KLController):
    """Proportional control in log space that steers the KL towards a target.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2, with the step counted in
    samples as in their code (openai/lm-human-preferences, `AdaptiveKLController`):

        error = clip(kl / target - 1, -0.2, 0.2)
        value = value * (1 + error * num_samples / horizon)

    The KL and its target must be counted the same way (per token, or summed over a response).
    """

    kind: KLControllerKind = "adaptive"
    MAX_ERROR = 0.2
    # Bounds of the weight, far from any use: 0 could never grow again, and products stay in the range of fp32.
    MIN_COEF = 1e-30
    MAX_COEF = 1e30

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        """
        Args:
            coef: weight at the start, above 0 (a weight of 0 could never grow).
            target: KL to steer to, above 0.
            horizon: number of samples over which the weight changes by the error; above num_samples / 5.
        """
        super().__init__(coef)
        for name, number in (("coef", coef), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(number) and number > 0):
                raise UserError(f"kl.{name} must be a finite number above 0 for kl.kind adaptive, got {number}")
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Raise the weight if `kl` is above the target, lower it if below.

        Raises:
            ValueError: `kl` is not finite, num_samples is negative, or the horizon is so short that one update could
                make the weight zero or negative.
        """
        if not math.isfinite(kl):
            raise UserError(f"the KL to the reference is {kl}: the weight of its penalty cannot be adapted to it")
        if num_samples < 0:
            raise UserError(f"num_samples must be at least 0, got {num_samples}")
        if self.MAX_ERROR * num_samples >= self.horizon:
            raise UserError(
                f"kl.horizon {self.horizon} is too short for {num_samples} samples per update: it must be above "
                f"{self.MAX_ERROR * num_samples:g}, or the weight could turn negative"
            )
        error = min(max(kl / self.target - 1, -self.MAX_ERROR), self.MAX_ERROR)
        coef = self._coef * (1 + error * num_samples / self.horizon)
        self._coef = min(max(coef, self.MIN_COEF), self.MAX_COEF)

    def state_dict(self) -> dict[str, float | str]:
        return {"kind": self.kind, "value": self._coef}

    def load_state_dict(self, state: dict[str, float | str]) -> None:
        self._check_kind(state)
        coef = float(state["value"])
        if not (math.isfinite(coef) and coef > 0):
            raise UserError(f"the state of the KL controller has weight {coef}, it must be a finite number above 0")
        self._coef = coef


def make_kl_controller(
    kind: KLControllerKind, coef: float, target: float | None = None, horizon: float | None = None
) -> KLController:
    """The controller that the settings `kl.*` ask for. Raises ValueError naming a setting that is missing or wrong."""
    if kind == "fixed":
        return FixedKLController(coef)
    if kind == "adaptive":
        if target is None or horizon is None:
            raise UserError(f"kl.kind adaptive needs kl.target and kl.horizon, got {target} and {horizon}")
        return AdaptiveKLController(coef, target, horizon)
    raise UserError(f"kl.kind must be one of {', '.join(get_args(KLControllerKind))}, got {kind!r}")
