"""Checksums of files, and contents that are refused as a file of checksums."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from roll.checkpoint import checksums
from roll.checkpoint.checksums import CHECKSUMS, Checksum, checksum, read_checksums


@pytest.mark.parametrize("chunk", [2, 9, 10])
def test_a_file_of_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """The check value of CRC-32 is that of these nine digits."""
    monkeypatch.setattr(checksums, "CHUNK_BYTES", chunk)
    (tmp_path / "a").write_bytes(b"123456789")
    assert checksum(tmp_path / "a") == Checksum(9, 0xCBF43926)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.symlink_to("/proc/self/mem")  # Opens, and its first byte cannot be read.
    with pytest.raises(OSError, match="Input/output error") as error:
        checksum(file)
    assert (error.value.errno, error.value.filename) == (errno.EIO, str(file))


@pytest.mark.parametrize(
    "content", ["", "[]", "null", '{"a": []}', '{"a": {}}', '{"a": {"bytes": "x", "crc32": "0"}}', "\xff"]
)
def test_other_files_of_that_name_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / CHECKSUMS).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"checksums\.json is damaged, or not of a checkpoint: "):
        read_checksums(tmp_path)
