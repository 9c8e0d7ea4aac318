"""Micro-batch size: a token budget or a number of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import Field, PositiveInt

from roll.config.problems import Check, Problem
from roll.config.settings import Settings

DEFAULT_MAX_TOKENS = 16384


def _default_max_tokens(fields: dict[str, Any]) -> int | None:
    return DEFAULT_MAX_TOKENS if fields.get("rows") is None else None


class MicroBatchSettings(Settings):
    """The size of a micro-batch: a budget of tokens, or a number of rows. Exactly one is set; the other is null."""

    rows: PositiveInt | None = None
    """Rows of a micro-batch, whatever their length."""
    max_tokens: PositiveInt | None = Field(default_factory=_default_max_tokens)
    """Tokens without padding that a micro-batch holds at most; 16384 unless `rows` is set."""

    def checks(self) -> Iterable[Check]:
        return (self._exactly_one,)

    def _exactly_one(self) -> Iterator[Problem]:
        if (self.rows is None) == (self.max_tokens is None):
            given = "neither" if self.rows is None else f"max_tokens {self.max_tokens} and rows {self.rows}"
            yield Problem("", f"exactly one of max_tokens and rows must be set, the other null; got {given}")
