"""A token sequence with what is learned of it, and the one protocol that every source of them follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from roll.errors import UserError

Ids = NDArray[np.int64]


class DataError(UserError):
    """A fault of a sample, in words for its author: the message alone is shown, without a traceback."""


@dataclass(frozen=True)
class Sample:
    """One token sequence.

    Example: a prompt `[5, 6]` whose answer `[7, 2]` is to be learned has ids `[5, 6, 7, 2]` and in_loss
    `[False, False, True, True]`; as labels, which are one token ahead, that is `[-100, 7, 2, -100]`.
    """

    ids: Ids
    """`[n]` int64, none of them negative."""
    in_loss: NDArray[np.bool_]
    """`[n]` bool: whether the token is a label, where it is the next token."""
    origin: str
    """Place that the sample comes from, for messages: a row of a file, say."""

    @classmethod
    def from_signed(cls, tokens: Sequence[int] | Ids, origin: str) -> Sample:
        """From InternEvo's signed ids: -7 is token 7, which is never a label. Token 0 always is one.

        Raises DataError for anything but a flat sequence of integers.
        """
        signed = np.asarray(tokens)
        if signed.ndim != 1 or (signed.size and signed.dtype.kind not in "iu"):
            raise DataError(f"{origin}: tokens must be a flat list of integers, got {_shortened(tokens)}")
        signed = signed.astype(np.int64)
        return cls(np.abs(signed), signed >= 0, origin)

    def __len__(self) -> int:
        return len(self.ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError naming the first id that a vocabulary of this size does not have."""
        outside = np.flatnonzero(self.ids >= vocab_size)
        if len(outside):
            token = outside[0]
            raise DataError(
                f"{self.origin}: token {token} has id {self.ids[token]}, outside the vocabulary of {vocab_size}"
            )


class SampleSource(Protocol):
    """Token sequences in a fixed order, read one at a time.

    A source is sent to the process that prefetches, so it can be pickled, and holds no tokens that it can read again.
    """

    @property
    def lengths(self) -> Ids:
        """`[len]` int64: tokens of each sample, known without reading them."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`. Raises DataError if it cannot be read as what it was when the source was opened."""
        ...


def named_files(empty: Sequence[Path], shown: int = 3) -> str:
    """Words for files that hold nothing: the first of them by name.

    Example: `a.txt is empty`, or `a.txt, b.txt, c.txt and 4 more are empty`.
    """
    more = f" and {len(empty) - shown} more" if len(empty) > shown else ""
    return f"{', '.join(map(str, empty[:shown]))}{more} {'is' if len(empty) == 1 else 'are'} empty"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
