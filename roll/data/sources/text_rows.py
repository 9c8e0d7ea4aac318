"""Rows of jsonl and parquet files, one after the other, exactly as the file has them.

A string stays that string, whatever it looks like, and rows need not have the same keys. Files are UTF-8; no other
encoding is guessed.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.errors import UserError

COLUMNS = ("messages", "prompt", "response", "tools", "documents", "chat_template_kwargs")
"""Columns of a parquet file that are read; others may hold what they like."""

PARQUET = ".parquet"

OriginatedRow = tuple[str, Mapping[str, Any]]
"""Place of a row, for messages, and the row's values by column."""


def read_rows(path: Path, also: Collection[str] = ()) -> Iterator[OriginatedRow]:
    """Rows of a `.jsonl`, `.json` (one object per line, or an array of them) or `.parquet` file.

    Of a parquet file the columns `COLUMNS` are read, and those of `also`. A null in a struct of such a file stands for
    a key that the row does not have.

    Blank lines and a byte order mark are skipped. Raises ValueError naming the file, and the row where there is one,
    for what cannot be read.
    """
    check_file(path)
    rows = 0
    try:
        for row in _parquet(path, also) if path.suffix == PARQUET else _READERS[path.suffix](path):
            rows += 1
            yield row
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise UserError(f"{path} is empty: it holds no row")


def check_file(path: Path) -> None:
    """Raise ValueError for what is no file, or none of a kind that `read_rows` reads."""
    if path.suffix not in (*_READERS, PARQUET):
        raise UserError(f"{path} is none of {', '.join((*_READERS, PARQUET))}")
    if not path.is_file():
        raise UserError(f"{path} is not a file")


def origin_of(path: str | Path, row: int) -> str:
    """The name of row `row`, counted from 0, in messages, where it is counted from 1."""
    return f"{path} row {row + 1}"


def _json_lines(path: Path) -> Iterator[OriginatedRow]:
    row = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not content.strip():
                continue
            origin = origin_of(path, row)
            if number != row + 1:
                origin += f" (line {number})"
            parsed = _parsed(content, origin, "" if line.endswith(b"\n") else "; the file ends within this line")
            yield origin, _object(parsed, origin)
            row += 1


def _json(path: Path) -> Iterator[OriginatedRow]:
    """One object per line, or one array of objects."""
    with path.open("rb") as stream:
        beginning = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    if not beginning.startswith(b"["):
        yield from _json_lines(path)
        return
    rows = _parsed(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path), "")
    for number, row in enumerate(rows):
        yield origin_of(path, number), _object(row, origin_of(path, number))


def _parsed(content: bytes, origin: str, hint: str) -> Any:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of it is 0x{content[error.start]:02x}"
        raise UserError(f"{origin} is not UTF-8 text: {byte}; convert the file to UTF-8") from error
    try:
        return json.loads(text, object_pairs_hook=_without_repeated)
    except _RepeatedKeyError as error:
        raise UserError(f"{origin} has the key {error.args[0]!r} twice in one object: which one holds?") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if b"\n" in content.rstrip() else ""
        place = f"at {line}character {error.colno}{hint}"
        raise UserError(f"{origin} is not JSON: {error.msg.removesuffix(' at')} {place}") from error
    except (ValueError, RecursionError) as error:  # A number of thousands of digits; lists in lists without end.
        raise UserError(f"{origin} is not JSON that can be read: {error}") from error


class _RepeatedKeyError(Exception):
    """A JSON object that has the key of the first argument more than once."""


def _without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _RepeatedKeyError(repeated)
    return made


def _object(value: Any, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        found = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        raise UserError(f"{origin} must be an object with messages, or prompt and response; it is {found}")
    return value


def _parquet(path: Path, also: Iterable[str]) -> Iterator[OriginatedRow]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: parquet files need pyarrow: pip install 'roll[parquet]'") from error
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "messages" not in names and not {"prompt", "response"} <= set(names):
                found = ", ".join(names) or "none"
                raise UserError(f"{path} must have the column messages, or prompt and response; it has {found}")
            columns, first = [name for name in dict.fromkeys((*COLUMNS, *also)) if name in names], 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for number, row in enumerate(_values(batch, path, first), start=first):
                    yield origin_of(path, number), {name: _without_nulls(value) for name, value in row.items()}
                first += batch.num_rows
    except pa.ArrowException as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _without_nulls(value: Any) -> Any:
    """A value of a column without the nulls of its structs, of which each has the keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _values(batch: Any, path: Path, first: int) -> list[dict[str, Any]]:
    """Rows of a record batch as Python objects; Arrow leaves it to this step to look at the text."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            try:
                batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                origin = origin_of(path, first + number)
                raise UserError(f"{origin} is not UTF-8 text: {error.reason} at byte {error.start + 1}") from error
        raise


_READERS: dict[str, Callable[[Path], Iterator[OriginatedRow]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
}
