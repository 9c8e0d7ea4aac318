"""JSON lines and files that are whole whenever a run stops.

A line reaches the file in one write, without a buffer of ours in between; a file that is replaced is written beside its
name and renamed. Ctrl-C or a crash between two statements then leaves complete lines and complete files.
"""

from __future__ import annotations

import json
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.errors import UserError


class JsonLinesFile:
    """A file that grows by one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line; the file holds it when this returns. Raises ValueError for NaN or infinity (not JSON)."""
        self._file.write(to_json_line(record))

    def close(self) -> None:
        self._file.close()


def keep_records(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Cut a file of records down to those of steps up to `last_step`, and return them; none if there is no file."""
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [record for record in records if record["step"] is not None and record["step"] <= last_step]
    replace_file(path, b"".join(map(to_json_line, kept)))
    return kept


def to_json_line(record: Mapping[str, Any]) -> bytes:
    """One object as UTF-8 JSON and a newline. Floats are written as `repr` writes them, so none loses a digit."""
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file: a reader finds the old one or the new one, never a part."""
    beside = temporary_path(path)
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Where `replace_file` writes before it renames."""
    return path.with_name(f".{path.name}.tmp")


def plain_number(value: Any, name: str) -> int | float:
    """An int, float, bool, NumPy scalar or 0-dim tensor as int or float. Raises ValueError naming it for all else."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise UserError(f"metric {name!r} must be a number or a 0-dim tensor, got {type(value).__name__}: {value!r}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def split_not_finite(values: Mapping[str, int | float]) -> tuple[dict[str, int | float | None], dict[str, str]]:
    """Values fit for JSON (NaN and infinities as None), and the names of those that were not with what they were."""
    not_finite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    return {name: None if name in not_finite else value for name, value in values.items()}, not_finite
