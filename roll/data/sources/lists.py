"""Token sequences that are in memory already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.sources.sample import Ids, Sample
from roll.errors import UserError


class ListSource:
    """Lists of token ids, or arrays of them; a negative id is a token without loss (`Sample.from_signed`)."""

    def __init__(self, samples: Sequence[Sequence[int] | Ids]) -> None:
        self._samples = samples
        for number, sample in enumerate(samples):
            if not hasattr(sample, "__len__"):
                raise UserError(f"sample {number} must be a list of token ids, got {sample!r}")
        self._lengths = np.fromiter(map(len, samples), dtype=np.int64, count=len(samples))

    @property
    def lengths(self) -> Ids:
        """`[len]` int64."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        """Raises ValueError if the sample holds anything but integers."""
        return Sample.from_signed(self._samples[index], f"sample {index}")
