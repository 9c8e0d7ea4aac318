"""Conversations in jsonl and parquet files.

Each row has `messages`, or `prompt` and `response`, and may have `tools`, `documents` and `chat_template_kwargs`, which
go to the chat template. Other keys of a row are not read. Files are tokenized once, into files that are mapped into
memory and found again at the next start; the length of each row is what stays resident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roll.config import expand_path
from roll.data.sources.sample import Ids, Sample
from roll.data.sources.text_rows import origin_of
from roll.data.sources.token_cache import CachedTokens, cached_tokens, default_cache_dir
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextFiles:
    """Rows of files as samples, in the order given; of each only the answers are learned.

    Several processes may do this at once: each waits for, or finds, what another has written.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache_dir: str | Path | None = None,
    ) -> None:
        """Read and tokenize `files`.

        Args:
            files: one or more of `.jsonl`, `.json` (one object per line, or an array of objects) and `.parquet` (which
                needs the extra `parquet`).
            tokenizer: a fast one, with a chat template if the rows are `messages`.
            cache_dir: where tokens are kept; by default `default_cache_dir()`.

        Raises ValueError naming file and row for what cannot be read, and as `encode_messages` does.
        """
        self._files = [expand_path(file) for file in ([files] if isinstance(files, str | Path) else files)]
        if not self._files:
            raise UserError("no files are given")
        kept = default_cache_dir() if cache_dir is None else expand_path(cache_dir)
        self._parts = [CachedTokens(cached_tokens(file, tokenizer, kept)) for file in self._files]
        self._lengths = np.concatenate([part.lengths for part in self._parts])
        self._first = np.cumsum([0, *(len(part.lengths) for part in self._parts)])

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on what of the rows the chat template does not read, if there is anything."""
        unread = sum((Counter(part.unread) for part in self._parts), Counter[str]())
        found = ", ".join(f"{name} ({number} of {len(self)} rows)" for name, number in unread.items())
        return (f"the chat template does not read: {found}",) if found else ()

    @property
    def lengths(self) -> Ids:
        """`[len]` int64."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        """Row `index` of all files together."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        row = index - int(self._first[number])
        return Sample(*self._parts[number][row], origin_of(self._files[number], row))
