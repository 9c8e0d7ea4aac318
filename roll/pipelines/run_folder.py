"""Whether the folder of a run can be made and written to, asked before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from roll.checkpoint.folders import Kind, refuse_to_replace
from roll.config import Problem

FINAL_MODEL = "final"
"""The folder of a run that holds the trained model in Hugging Face layout."""


def run_folder_problems(run_dir: Path) -> Iterator[Problem]:
    """What is in the way of `run_dir`, under the setting that it comes from. Nothing is made."""
    folder = run_dir.absolute()
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    setting = "name" if folder == run_dir.absolute() else "output_dir"
    if not folder.is_dir():
        yield Problem(setting, f"{folder} must be a folder, and is a file")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Problem(setting, f"{folder} may not be written to, so {run_dir} cannot be made or filled")
    else:
        try:  # Now, and not when the model is trained.
            refuse_to_replace(run_dir / FINAL_MODEL, Kind.MODEL)
        except ValueError as error:
            yield Problem("name", str(error))
