"""Sizes and CRC-32s of the files of a checkpoint, in a file of their own that is written last.

A load compares the files with them before it replaces a single weight: neither torch nor Megatron-Core notices a
flipped bit, and both notice a short file only after others have been read. The cost is one more reading of each file,
at the save (when the system still has it in memory) and at the load, divided over the ranks; about 1.5 GB/s per rank.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from roll.errors import UserError

CHECKSUMS = "checksums.json"
CHUNK_BYTES = 16 << 20


class Checksum(NamedTuple):
    """Size of a file, and the CRC-32 of its content."""

    num_bytes: int
    crc32: int


def checksum(file: Path) -> Checksum:
    """Read a file once. Raises OSError, which names the file."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    size = crc = 0
    try:
        with file.open("rb", buffering=0) as content:
            while count := content.readinto(buffer):
                size, crc = size + count, zlib.crc32(buffer[:count], crc)
    except OSError as error:  # That of a read has no name.
        raise OSError(error.errno, error.strerror, str(file)) from error
    return Checksum(size, crc)


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, Checksum]:
    """Checksums of files of `folder`, by name."""
    return {name: checksum(folder / name) for name in names}


def write_checksums(folder: Path, sums: Mapping[str, Checksum]) -> None:
    """Write the file of checksums, of all other files of `folder`."""
    content = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(sums.items())}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, Checksum]:
    """Read the file of checksums, and compare the sizes of all files.

    Raises:
        ValueError: `folder` lacks a file, or one has another size than it was written with.
    """
    file = folder / CHECKSUMS
    incomplete = f"{folder} is not a complete checkpoint (an interrupted save leaves `*.unfinished`)"
    if not file.is_file():
        raise UserError(f"{incomplete}: it holds no {CHECKSUMS}")
    try:
        content = json.loads(file.read_bytes())
        sums = {name: Checksum(int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # Not JSON, or JSON of something else.
        raise UserError(f"{file} is damaged, or not of a checkpoint: {error!r}") from error
    absent = [name for name in sums if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{incomplete}: it holds no {', '.join(absent)}")
    for name, (size, _) in sums.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise UserError(f"{folder / name} is damaged: it has {found} bytes and was written with {size}")
    return sums


def check_files(folder: Path, sums: Mapping[str, Checksum]) -> None:
    """Raise ValueError if the content of one of these files is not as it was written. Reads them all."""
    for name, written in sums.items():
        found = checksum(folder / name)
        if found != written:
            raise UserError(
                f"{folder / name} is damaged: it has {found.num_bytes} bytes with CRC-32 {found.crc32:08x}, and was "
                f"written with {written.num_bytes} and {written.crc32:08x}"
            )
