"""Some of a source's samples, so that others can be held out."""

from __future__ import annotations

import numpy as np

from roll.data.sources.sample import Ids, Sample, SampleSource
from roll.errors import UserError


class SourcePart:
    """The samples of `source` with these numbers, in this order."""

    def __init__(self, source: SampleSource, numbers: Ids) -> None:
        self._source = source
        self._numbers = numbers
        self._lengths = source.lengths[numbers]

    @property
    def lengths(self) -> Ids:
        """`[len]` int64."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` of the part."""
        return self._source[int(self._numbers[index])]


def hold_out(source: SampleSource, share: float, seed: int) -> tuple[SourcePart, SourcePart]:
    """The samples to train on and those held out: `share` of all, at least one, drawn by `seed`.

    Both keep the order of the source. Raises ValueError if nothing would be left to train on.
    """
    number = max(1, round(share * len(source)))
    if number >= len(source):
        raise UserError(f"{share} of {len(source)} samples is {number} held out, which leaves none to train on")
    order = np.random.default_rng([seed, len(source)]).permutation(len(source))
    return SourcePart(source, np.sort(order[number:])), SourcePart(source, np.sort(order[:number]))
