"""Data of a supervised run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from roll.config.paths import PathSetting, PatternsSetting
from roll.config.problems import Check, Problem
from roll.config.settings import Settings
from roll.config.task import TaskSettings

SourceKind = Literal["text", "conversations", "tokenized", "task"]


class SFTDataSettings(Settings):
    """Data that the model learns from, and data that it is measured on."""

    kind: SourceKind
    """text: UTF-8 files, a sample for each paragraph; conversations: jsonl or parquet with messages, or prompt and
    response; tokenized: InternEvo's .bin files, or folders of them; task: solved problems, of which the answers are
    learned."""
    files: PatternsSetting = ()
    """Files to train on, seen from the working directory; patterns such as docs/**/*.md stand for what matches them."""
    held_out_files: PatternsSetting = ()
    """Files that are only measured on."""
    held_out_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples, drawn by the run's seed, that is only measured on; with no `held_out_files`."""
    cache_dir: PathSetting | None = None
    """Folder that keeps the tokens of conversations for the next start; null: roll/ in the user's cache folder
    ($XDG_CACHE_HOME, or ~/.cache)."""
    task: TaskSettings | None = None
    """The problems of kind task; its held-out ones are only measured on."""

    def checks(self) -> Iterable[Check]:
        return (self._held_out_once, self._files_or_task)

    def _held_out_once(self) -> Iterator[Problem]:
        if self.held_out_files and self.held_out_share:
            yield Problem("held_out_share", f"must be 0 where there are held_out_files, got {self.held_out_share}")

    def _files_or_task(self) -> Iterator[Problem]:
        """Each setting belongs to one kind of source."""
        if self.kind != "task":
            if not self.files:
                yield Problem("files", f"kind '{self.kind}' needs at least one")
            if self.task is not None:
                yield Problem("task", f"must be null, because kind is '{self.kind}'")
            return
        if self.task is None:
            yield Problem("task", "kind 'task' needs it, got null")
        for name in ("files", "held_out_files", "held_out_share"):
            if getattr(self, name):
                yield Problem(name, "must not be set, because kind is 'task'")
