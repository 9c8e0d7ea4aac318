"""Conversations in jsonl and parquet files, by way of Hugging Face datasets (the extra `datasets`).

Each row has `messages`, or `prompt` and `response`. Files are tokenized once, into Arrow files that are mapped into
memory and found again at the next start; what stays resident is the length of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.config import expand_path
from roll.data.sources.conversation import encode_messages, encode_response
from roll.data.sources.sample import Ids, Sample

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


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
            files: one or more of `.jsonl`, `.json` (one object per line) and `.parquet`.
            tokenizer: with a chat template if the rows are `messages`.
            cache_dir: where Arrow files are kept; by default where Hugging Face keeps them.

        Raises ValueError naming file and row for what cannot be read, and as `encode_messages` does.
        """
        from datasets import concatenate_datasets

        paths = [expand_path(file) for file in ([files] if isinstance(files, str | Path) else files)]
        if not paths:
            raise ValueError("no files are given")
        parts = [_tokenized(path, tokenizer, cache_dir) for path in paths]
        self._files = [str(path) for path in paths]
        self._first = np.cumsum([0, *map(len, parts)])
        self._rows = concatenate_datasets(parts).with_format("numpy")
        self._lengths = np.concatenate([_column(part, "length") for part in parts])

    @property
    def lengths(self) -> Ids:
        """`[len]` int64."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Row `index` of all files together."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        origin = _origin(self._files[number], index - int(self._first[number]))
        row = self._rows[index]
        return Sample(row["ids"].astype(np.int64), row["in_loss"].astype(np.bool_), origin)


def _origin(file: str, row: int) -> str:
    return f"{file} row {row + 1}"


def _column(rows: Dataset, name: str) -> Ids:
    column: Ids = rows.data.column(name).to_numpy().astype(np.int64)
    return column


def _tokenized(path: Path, tokenizer: PreTrainedTokenizerBase, cache_dir: str | Path | None) -> Dataset:
    """Columns `ids`, `in_loss` and `length` of one file's rows."""
    from datasets import Features, List, Value

    rows = _read(path, cache_dir)
    columns = set(rows.column_names)
    if "messages" not in columns and not {"prompt", "response"} <= columns:
        found = ", ".join(sorted(columns))
        raise ValueError(f"{path} must have the column messages, or prompt and response; it has {found}")
    return rows.map(
        partial(_encode_row, tokenizer=tokenizer, file=str(path)),
        with_indices=True,
        remove_columns=rows.column_names,
        features=Features({"ids": List(Value("int32")), "in_loss": List(Value("bool")), "length": Value("int64")}),
        desc=f"Tokenizing {path.name}",
    )


def _read(path: Path, cache_dir: str | Path | None) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if path.suffix not in _READERS:
        raise ValueError(f"{path} is none of {', '.join(_READERS)}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    cache = None if cache_dir is None else str(expand_path(cache_dir))
    try:
        return load_dataset(_READERS[path.suffix], data_files=str(path), split="train", cache_dir=cache)
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error.__cause__ or error}") from error


def _encode_row(row: Mapping[str, Any], index: int, *, tokenizer: PreTrainedTokenizerBase, file: str) -> dict[str, Any]:
    origin = _origin(file, index)
    if "messages" in row:
        encoded = encode_messages(row["messages"], tokenizer, origin)
    else:
        encoded = encode_response(row["prompt"], row["response"], tokenizer, origin)
    return {"ids": encoded.ids, "in_loss": encoded.in_loss, "length": len(encoded.ids)}
