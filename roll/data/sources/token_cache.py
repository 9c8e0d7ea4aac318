"""Tokens of a file of conversations, kept on disk under everything that decides them.

    cache_dir/
      FINGERPRINT/ids.bin        int32, the tokens of all rows one after the other
      FINGERPRINT/in_loss.bin    bool, of each token whether it is learned
      FINGERPRINT/lengths.npy    int64, tokens of each row
      FINGERPRINT/unread.json    number of rows for each name of what the chat template does not read
      FINGERPRINT.lock           held while the folder is written; other processes wait for it

A folder appears when it is complete. Nothing here removes old ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from roll.data.sources.chat_template import variables_of
from roll.data.sources.conversation import conversation_texts
from roll.data.sources.learned_text import EncodedText, check_offsets, encode_learned
from roll.data.sources.sample import Ids
from roll.data.sources.text_rows import check_file, read_rows
from roll.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_AT_ONCE = 1000
"""Rows that are tokenized together: fast tokenizers take them on several threads."""
ENCODING_MODULES = (
    "roll.data.special_tokens",
    "roll.data.lost_text",
    "roll.data.tokenizer",
    "roll.data.sources.learned_text",
    "roll.data.sources.chat_template",
    "roll.data.sources.answers",
    "roll.data.sources.row_keys",
    "roll.data.sources.conversation",
    "roll.data.sources.text_rows",
    "roll.data.sources.token_cache",
)
"""Our code that decides what a row's tokens are, and which of them are learned."""
UNREAD = "unread.json"
LIBRARIES = ("transformers", "tokenizers", "jinja2")
"""Packages that decide the same."""


def default_cache_dir() -> Path:
    """The folder `roll` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roll"


def cached_tokens(path: Path, tokenizer: PreTrainedTokenizerBase, cache_dir: Path) -> Path:
    """The folder with the tokens of a file, which is written first where it is not there yet.

    Several processes may ask at once: one writes, the others wait. Raises ValueError as `read_rows` and
    `encode_conversations` do, and naming `cache_dir` if it cannot be written.
    """
    folder = cache_dir / fingerprint(path, tokenizer)
    if folder.is_dir():
        return folder
    with _lock(folder.with_name(f"{folder.name}.lock")):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # Of a process that was killed: the lock is ours.
            partial.mkdir()
            try:
                unread: Counter[str] = Counter()
                _write(partial, _encoded(path, tokenizer, unread))
                (partial / UNREAD).write_text(json.dumps(unread))
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def fingerprint(path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """A name for everything that decides the tokens of a file.

    Raises ValueError for a file that cannot be read, and a tokenizer without offsets.
    """
    check_file(path)
    check_offsets(tokenizer)
    digest = hashlib.blake2b(digest_size=16)
    for ingredient in (encoding_source(), *_versions(), *_of_tokenizer(tokenizer), path.suffix, _content(path)):
        digest.update(hashlib.blake2b(ingredient.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def encoding_source() -> str:
    """The source of `ENCODING_MODULES`."""
    return "".join(inspect.getsource(importlib.import_module(name)) for name in ENCODING_MODULES)


def _versions() -> Iterator[str]:
    for name in LIBRARIES:
        yield f"{name} {version(name)}"


def _of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """All that a tokenizer's results depend on. Its padding and truncation are set by each call."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    yield json.dumps(backend | {"padding": None, "truncation": None}, sort_keys=True)
    yield str(bool(tokenizer.split_special_tokens))
    yield repr(sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()))
    yield json.dumps(tokenizer.chat_template, sort_keys=True)
    dated = re.search(r"\bstrftime_now\b", json.dumps(tokenizer.chat_template))
    yield date.today().isoformat() if dated else ""  # Templates may write the day into the text.


def _content(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however that ends."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("w")
    except OSError as error:
        raise UserError(f"cache_dir {file.parent} cannot keep the tokens of conversations: {error}") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _encoded(path: Path, tokenizer: PreTrainedTokenizerBase, unread: Counter[str]) -> Iterator[EncodedText]:
    """Tokens of each row of a file; `unread` counts the rows with keys that are not read."""
    rows = iter(
        track(
            read_rows(path, variables_of(tokenizer)),
            description=f"Tokenizing {path.name}",
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
    )
    while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
        texts = conversation_texts(chunk, tokenizer)
        unread.update(name for text in texts for name in text.unread)
        yield from encode_learned(texts, tokenizer)


def _write(folder: Path, rows: Iterator[EncodedText]) -> None:
    lengths: list[int] = []
    with (folder / "ids.bin").open("wb") as ids, (folder / "in_loss.bin").open("wb") as in_loss:
        for row in rows:
            ids.write(np.array(row.ids, dtype=np.int32).tobytes())
            in_loss.write(np.array(row.in_loss, dtype=np.bool_).tobytes())
            lengths.append(len(row.ids))
    np.save(folder / "lengths.npy", np.array(lengths, dtype=np.int64))


class CachedTokens:
    """The tokens of a folder that `cached_tokens` wrote: mapped into memory, and opened anew where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lengths = np.load(folder / "lengths.npy")
        """`[rows]` int64."""
        self.unread: dict[str, int] = json.loads((folder / UNREAD).read_text())
        """Number of rows for each name of what the chat template does not read."""
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._open()

    def __getitem__(self, row: int) -> tuple[Ids, NDArray[np.bool_]]:
        """The ids of row `row`, int64, and of each whether it is learned."""
        span = slice(int(self._starts[row]), int(self._starts[row] + self.lengths[row]))
        return self._ids[span].astype(np.int64), np.array(self._in_loss[span])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_ids", "_in_loss")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        self._ids = np.memmap(self._folder / "ids.bin", dtype=np.int32, mode="r")
        self._in_loss = np.memmap(self._folder / "in_loss.bin", dtype=np.bool_, mode="r")
