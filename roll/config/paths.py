"""Paths of settings and of arguments: a `~` or `~name` in front stands for a home folder.

Nothing else is replaced. `$HOME` is part of a file's name; in YAML, `${oc.env:HOME}` is OmegaConf's way to the
environment. A file whose own name begins with `~` is given by its absolute path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Strict

from roll.errors import UserError


def expand_path(path: str | os.PathLike[str]) -> Path:
    """`path` with its home folder in the place of `~`. Raises ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{os.fspath(path)!r} begins with ~, but there is no such home folder") from error


def _expand_pattern(pattern: str) -> str:
    """The same for text that may hold `*` and the like."""
    return str(expand_path(pattern)) if pattern.startswith("~") else pattern


PathSetting = Annotated[Path, Strict(False), AfterValidator(expand_path)]
"""Type of a setting that is a path of a file or a folder."""
PatternsSetting = Annotated[tuple[Annotated[str, AfterValidator(_expand_pattern)], ...], Strict(False)]
"""Type of a setting that is a list of paths, each of which may be a pattern such as `docs/**/*.md`."""
