"""The denominators of a step's loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.errors import UserError


@dataclass(frozen=True)
class LossNormalizers:
    """What a step's loss is divided by, counted over all its data-parallel ranks and micro-batches.

    Attributes:
        tokens: loss tokens.
        sequences: rows with at least one loss token.
    """

    tokens: int
    sequences: int

    def __post_init__(self) -> None:
        if not 0 <= self.sequences <= self.tokens or (self.tokens and not self.sequences):
            raise UserError(f"{self.tokens} tokens in {self.sequences} sequences with at least one token each")


def count_loss_tokens(mask: Tensor) -> LossNormalizers:
    """Count the kept tokens of a loss mask [B, S-1], and the rows that have any."""
    keep = mask != 0
    return LossNormalizers(tokens=int(keep.sum()), sequences=int(keep.any(dim=1).sum()))
