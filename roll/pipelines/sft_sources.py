"""The samples of a supervised run: those to train on, and those held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.config import ConfigError, Problem, SFTConfig
from roll.data.sources.paragraphs import Paragraphs
from roll.data.sources.part import hold_out
from roll.data.sources.sample import SampleSource
from roll.data.sources.text_files import TextFiles
from roll.data.sources.tokenized_folder import TokenizedFolder
from roll.data.task_answers import TaskAnswers
from roll.data.tasks import ReasoningTask


@dataclass(frozen=True)
class Sources:
    """What a run learns from and is measured on."""

    train: SampleSource
    held_out: SampleSource | None
    notes: tuple[str, ...] = ()
    """Sentences on what of the files is not read or not learned."""


def open_sources(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> Sources:
    """Find the samples that `config.data` asks for.

    Raises ValueError naming the file, the problem or the setting for what cannot be read.
    """
    data = config.data
    if data.task is not None:
        task, form = ReasoningTask.of(data.task, "data.task"), (data.task.max_prompt_tokens, data.task.chat_template)
        return Sources(TaskAnswers(task.train, tokenizer, *form), TaskAnswers(task.eval, tokenizer, *form))
    _check_files_are_held_out(data.files, data.held_out_files)
    source = _from_files(config, "files", data.files, tokenizer)
    if data.held_out_share:
        try:
            return Sources(*hold_out(source, data.held_out_share, config.seed), source.notes)
        except ValueError as error:
            raise ConfigError([Problem("data.held_out_share", str(error))]) from error
    if data.held_out_files:
        held_out = _from_files(config, "held_out_files", data.held_out_files, tokenizer)
        return Sources(source, held_out, (*source.notes, *(f"held out: {note}" for note in held_out.notes)))
    return Sources(source, None, source.notes)


def _check_files_are_held_out(files: Sequence[str], held_out: Sequence[str]) -> None:
    both = {path.resolve() for path in _matches("files", files)} & {
        path.resolve() for path in _matches("held_out_files", held_out)
    }
    if both:
        found = ", ".join(sorted(map(str, both)))
        raise ConfigError([Problem("data.held_out_files", f"also among data.files: {found}")])


def _from_files(
    config: SFTConfig, setting: str, patterns: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Paragraphs | TextFiles | TokenizedFolder:
    paths = _matches(setting, patterns)
    match config.data.kind:
        case "text":
            return Paragraphs(paths, tokenizer)
        case "conversations":
            return TextFiles(paths, tokenizer, cache_dir=config.data.cache_dir)
        case "tokenized":
            if len(paths) > 1:
                found = ", ".join(map(str, paths))
                raise ConfigError(
                    [Problem(f"data.{setting}", f"tokenized data are one folder or .bin file; got {found}")]
                )
            return TokenizedFolder(paths[0])
        case other:
            raise AssertionError(other)


def _matches(setting: str, patterns: Sequence[str]) -> list[Path]:
    """The paths that `patterns` stand for, each once, those of one pattern sorted."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        found = [pattern] if Path(pattern).exists() else sorted(glob(pattern, recursive=True))
        if not found:
            raise ConfigError([Problem(f"data.{setting}", f"nothing is at {pattern!r}")])
        paths |= dict.fromkeys(map(Path, found))
    return list(paths)
