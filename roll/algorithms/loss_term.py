"""A term of a loss, as an algorithm declares it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from roll.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from roll.protocol import DataProto
    from roll.strategies.output import ModelOutput

TOKENS = ("input_ids", "attention_mask", "response_mask")
"""Fields that every loss and every look-up of a model role is sent."""

LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Normalizer = LossAggregation | float
"""Divisor of the token losses of a step; see `aggregate_loss`. A number divides their plain sum."""

STEP_METRICS = frozenset({"loss", "grad_norm", "lr", "skipped_steps"})
"""Metrics of every optimizer step. No term gives one of its own these names."""

TokenLoss = tuple["Tensor", dict[str, "Tensor"]]
"""A loss per token, `[b, S-1]`, and metrics per token by name, of which the mean over the tokens of a step is logged.
Values where `response_mask[:, 1:]` is 0 do not count."""


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One summand of the loss of a role. It is pickled on its way to the ranks."""

    function: Callable[[DataProto, ModelOutput], TokenLoss]
    """Pure function of a micro-batch and the model's answers about it."""
    reads: frozenset[str] = frozenset()
    """Fields of the micro-batch that it reads beside `TOKENS`; no others are sent."""
    per: Normalizer = "token-mean"
    """Divisor of its sum."""
    weight: float = 1.0
    """Factor in the sum of terms."""

    def __post_init__(self) -> None:
        check_normalizer(self.per)
        if isinstance(self.reads, str) or not all(isinstance(name, str) for name in self.reads):
            raise UserError(f"reads of a term is a set of names of fields, got {self.reads!r}")
        if not math.isfinite(self.weight):
            raise UserError(f"the weight of a term must be finite, got {self.weight}")


def check_normalizer(per: Normalizer) -> None:
    """Raise ValueError unless `per` is a way of aggregation, or a finite number above 0."""
    if isinstance(per, int | float):
        if not 0 < per < math.inf:
            raise UserError(f"a loss is divided by a finite number above 0, got {per}")
    elif per not in get_args(LossAggregation):
        raise UserError(f"loss_agg must be one of {', '.join(get_args(LossAggregation))}, got {per!r}")
