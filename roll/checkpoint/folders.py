"""Folders that appear only when they are complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def begin_folder(folder: Path) -> Path:
    """An empty folder beside `folder` to write into; `finish_folder` puts it in its place."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def finish_folder(unfinished: Path, folder: Path) -> None:
    """Let a complete folder appear under its own name, in place of an older one."""
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)  # Not deleted before the new one is in its place.
    os.replace(unfinished, folder)
    shutil.rmtree(replaced, ignore_errors=True)
