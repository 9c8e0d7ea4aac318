"""Plain text as samples: a paragraph is the lines between blank ones, and ends with the tokenizer's end token.

A token that the tokenizer can only read as unknown stays in the text, and is not learned; `num_unknown` says how many
there are.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from roll.config import expand_path
from roll.data.sources.sample import DataError, Ids, Sample, named_files
from roll.data.special_tokens import encode_text, front_tokens
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Paragraphs:
    """The paragraphs of UTF-8 files, in the order given. Texts are read and tokenized again when they are asked for."""

    def __init__(self, files: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the paragraphs of `files` and count their tokens.

        Raises ValueError naming the file for what is no file or not UTF-8, naming all files where none holds text, and
        for a tokenizer without an end token.
        """
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end token, which ends a paragraph")
        self._files = [expand_path(file) for file in files]
        self._tokenizer = tokenizer
        self._front = front_tokens(tokenizer)
        spans: list[tuple[int, int, int]] = []  # number of the file, first byte, byte behind the last
        lengths: list[int] = []
        self.num_unknown = 0
        self.empty_files: tuple[Path, ...] = ()
        """Files without any text, which give no sample."""
        for number, file in enumerate(self._files):
            content, before = _read(file), len(spans)
            for start, stop in _spans(content):
                sample = self._sample(content[start:stop], "")
                spans.append((number, start, stop))
                lengths.append(len(sample))
                self.num_unknown += int((~sample.in_loss).sum())
            if len(spans) == before:
                self.empty_files += (file,)
        if not spans:
            raise UserError(f"no text to read: {named_files(self.empty_files)}")
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3)
        self._lengths = np.array(lengths, dtype=np.int64)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what is not learned as it stands."""
        unknown = f"{self.num_unknown} tokens are unknown to the tokenizer, and are not learned"
        empty = f"no text to read: {named_files(self.empty_files)}"
        return (unknown,) * bool(self.num_unknown) + (empty,) * bool(self.empty_files)

    @property
    def lengths(self) -> Ids:
        """`[len]` int64."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        """Read and tokenize a paragraph. Raises DataError if the file has changed since."""
        number, start, stop = self._spans[index].tolist()
        file = self._files[number]
        with file.open("rb") as stream:
            stream.seek(start)
            content = stream.read(stop - start)
        origin = f"{file} at byte {start}"
        try:
            sample = self._sample(content, origin)
        except UnicodeDecodeError as error:
            raise DataError(f"{origin}: the paragraph is no longer UTF-8 text: the file has changed") from error
        if len(sample) != self._lengths[index]:
            was, now = self._lengths[index], len(sample)
            raise DataError(f"{sample.origin}: the paragraph had {was} tokens and now has {now}: the file has changed")
        return sample

    def _sample(self, content: bytes, origin: str) -> Sample:
        end = self._tokenizer.eos_token_id
        ids = encode_text(content.decode(), self._tokenizer, self._front)
        if not ids or ids[-1] != end:
            ids = [*ids, end]
        array = np.array(ids, dtype=np.int64)
        unknown = self._tokenizer.unk_token_id
        return Sample(array, np.ones(len(array), np.bool_) if unknown is None else array != unknown, origin)


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise UserError(f"{file} is not a file")
    content = file.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return content


def _spans(content: bytes) -> Iterator[tuple[int, int]]:
    """First byte of each paragraph, and the byte behind its last line's text."""
    start = stop = offset = len(BOM_UTF8) if content.startswith(BOM_UTF8) else 0
    for line in content[offset:].splitlines(keepends=True):
        if line.strip():
            if stop <= start:
                start = offset
            stop = offset + len(line.rstrip())
        elif stop > start:
            yield start, stop
            start = stop = offset
        offset += len(line)
    if stop > start:
        yield start, stop
