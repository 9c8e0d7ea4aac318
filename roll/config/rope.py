"""Settings that stretch rotary position embeddings to longer contexts. `roll.models.rotary` computes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from roll.config.problems import Check, Problem
from roll.config.settings import Settings
from roll.families import RopeType

LLAMA3_ONLY = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class RopeScaling(Settings):
    """Scaling of the rotary position embedding, under Hugging Face's names."""

    rope_type: RopeType
    """linear divides all positions; dynamic raises the base for sequences beyond the trained length (NTK); llama3
    slows the low frequencies."""
    factor: Annotated[float, Field(ge=1)]
    """Factor by which the context becomes longer."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths above original_max_position_embeddings / this are slowed by `factor`."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths below original_max_position_embeddings / this stay as they are."""
    original_max_position_embeddings: PositiveInt | None = None
    """llama3: the context before scaling."""

    def checks(self) -> Iterable[Check]:
        return (self._llama3_is_complete, self._frequencies_are_in_order)

    def _llama3_is_complete(self) -> Iterator[Problem]:
        for name in LLAMA3_ONLY:
            value = getattr(self, name)
            if self.rope_type == "llama3" and value is None:
                yield Problem(name, "rope_type 'llama3' needs it, but it is not given")
            if self.rope_type != "llama3" and value is not None:
                yield Problem(name, f"belongs to rope_type 'llama3', got {value} with {self.rope_type!r}")

    def _frequencies_are_in_order(self) -> Iterator[Problem]:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            yield Problem("low_freq_factor", f"{low} must be below high_freq_factor {high}")
