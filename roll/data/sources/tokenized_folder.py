"""InternEvo's tokenized data: `NAME.bin` with a JSON line `{"tokens": [...]}` per sample, beside it `NAME.bin.meta`.

The meta file is a NumPy array `[n, 2]` of (byte offset of the line, number of tokens). It is what makes random access
possible, and all that is read at the start; a line is read, and held against its meta entry, when its sample is asked
for. Negative ids are tokens without loss; id 0 cannot be marked so, that is a limit of the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from roll.config import expand_path
from roll.data.sources.sample import DataError, Ids, Sample, named_files
from roll.errors import UserError


class TokenizedFolder:
    """All `.bin` files of a folder and the folders below it, in the order of their paths; or one `.bin` file.

    Raises ValueError for a path without `.bin` files, files of which none holds a sample, a missing or unreadable meta
    file, and one that does not match the size of its `.bin` file; on access also for a line that is torn or does not
    match its meta entry, with its number.
    """

    def __init__(self, path: str | Path) -> None:
        path = expand_path(path)
        self.files = [path] if path.is_file() else sorted(path.rglob("*.bin"))
        if not self.files:
            raise UserError(f"{path} holds no .bin file")
        metas = [_read_meta(file) for file in self.files]
        self.empty_files = tuple(file for file, meta in zip(self.files, metas, strict=True) if not len(meta))
        """Files without a sample."""
        if len(self.empty_files) == len(self.files):
            raise UserError(f"no sample to read: {named_files(self.empty_files)}")
        self._first = np.cumsum([0, *map(len, metas)])  # [files + 1]: number of the first sample of each file
        self._offsets = np.concatenate([meta[:, 0] for meta in metas])
        self._lengths = np.concatenate([meta[:, 1] for meta in metas])

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on the files without a sample, if there are any."""
        return (f"no sample to read: {named_files(self.empty_files)}",) if self.empty_files else ()

    @property
    def lengths(self) -> Ids:
        """`[len]` int64, from the meta files."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        """Read one line. The file is opened each time, so that folders of many files need no open handles."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        file, line = self.files[number], index - int(self._first[number]) + 1
        with file.open("rb") as stream:
            stream.seek(int(self._offsets[index]))
            content = stream.readline()
        return Sample.from_signed(self._parsed(content, f"{file} line {line}", index), f"{file} line {line}")

    def _parsed(self, content: bytes, where: str, index: int) -> list[int]:
        offset, length = int(self._offsets[index]), int(self._lengths[index])
        try:
            entry = json.loads(content)
            tokens: list[int] = entry["tokens"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{where}: no JSON object {{"tokens": [...]}} at byte {offset}: the line is torn, or the meta file '
                "belongs to another .bin file"
            ) from error
        if not isinstance(tokens, list) or len(tokens) != length:
            found = f"{len(tokens)} tokens" if isinstance(tokens, list) else repr(tokens)[:60]
            raise DataError(f"{where}: the meta file says {length} tokens, the line holds {found}")
        return tokens


def write_tokenized(file: str | Path, samples: Iterator[list[int]] | list[list[int]]) -> None:
    """Write samples as a `.bin` file with its meta file. Both appear complete or, if writing fails, not at all.

    The meta file comes last: a `.bin` without one is refused when it is read.
    """
    file = expand_path(file)
    meta: list[tuple[int, int]] = []
    offset = 0
    partial_bin, partial_meta = _partial(file), _partial(_meta_of(file))
    try:
        with partial_bin.open("wb") as stream:
            for tokens in samples:
                line = json.dumps({"tokens": tokens}).encode() + b"\n"
                stream.write(line)
                meta.append((offset, len(tokens)))
                offset += len(line)
        with partial_meta.open("wb") as stream:
            np.save(stream, np.array(meta, dtype=np.int64).reshape(-1, 2))
        _meta_of(file).unlink(missing_ok=True)
        os.replace(partial_bin, file)
        os.replace(partial_meta, _meta_of(file))
    finally:
        partial_bin.unlink(missing_ok=True)
        partial_meta.unlink(missing_ok=True)


def _meta_of(file: Path) -> Path:
    return file.with_name(file.name + ".meta")


def _partial(file: Path) -> Path:
    return file.with_name(f".{file.name}.{os.getpid()}.partial")


def _read_meta(file: Path) -> Ids:
    """The meta array of a `.bin` file as `[n, 2]` int64, held against the size of the file and its last byte."""
    meta_file = _meta_of(file)
    if not meta_file.is_file():
        raise UserError(f"{file} has no meta file {meta_file.name} beside it")
    try:
        meta = np.load(meta_file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{meta_file} is not a NumPy array file: {error}") from error
    if meta.size == 0:
        meta = np.empty((0, 2), dtype=np.int64)
    if meta.ndim != 2 or meta.shape[1] != 2 or meta.dtype.kind not in "iu":
        raise UserError(f"{meta_file} must hold integers [n, 2], got {meta.dtype} {list(meta.shape)}")
    meta = meta.astype(np.int64)
    _check_offsets(file, meta_file, meta)
    return meta


def _check_offsets(file: Path, meta_file: Path, meta: Ids) -> None:
    size = file.stat().st_size
    if not len(meta):
        if size:
            raise UserError(f"{meta_file} has no entry, {file.name} has {size} bytes")
        return
    wrong = np.flatnonzero((np.diff(meta[:, 0], prepend=-1) <= 0) | (meta[:, 1] < 0))
    if len(wrong):
        raise UserError(f"{meta_file} entry {wrong[0] + 1} is {tuple(meta[wrong[0]].tolist())}: offsets must rise")
    last = int(meta[-1, 0])
    if last >= size:
        raise UserError(f"{meta_file} entry {len(meta)} begins at byte {last}, but {file.name} has {size} bytes")
    with file.open("rb") as stream:
        stream.seek(size - 1)
        if stream.read(1) != b"\n":
            raise UserError(f"{file} line {len(meta)} is torn: the file does not end with a line break")
        if meta[0, 0] != 0:
            raise UserError(f"{meta_file} entry 1 begins at byte {meta[0, 0]}, not where {file.name} begins")
        stream.seek(last)
        stream.readline()
        if stream.tell() != size:
            raise UserError(f"{meta_file} has {len(meta)} entries, {file.name} has lines behind that of the last")
