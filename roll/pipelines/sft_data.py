"""A supervised run's packs, planned and checked before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ConfigError, Problem, SFTConfig
from roll.data.packed_dataset import PackedDataset
from roll.data.sources.paragraphs import Paragraphs
from roll.data.sources.part import hold_out
from roll.data.sources.sample import SampleSource
from roll.data.sources.text_files import TextFiles
from roll.data.sources.tokenized_folder import TokenizedFolder
from roll.pipelines.prompt_data import load_tokenizer, tokenizer_problems


@dataclass(frozen=True)
class SFTData:
    """What a run learns from. It can be sent to the ranks: tokens are read where they are needed."""

    tokenizer: PreTrainedTokenizerBase
    train: PackedDataset
    """Shuffled by the run's seed, anew in each epoch."""
    held_out: PackedDataset | None
    """In the order of the source."""
    notes: tuple[str, ...]
    """What a user should know about the data, in sentences."""


def load_sft_data(config: SFTConfig) -> SFTData:
    """Find the files and plan the packs; a mistake in the settings, or in what they name, shows here.

    Raises:
        ValueError: a model folder without fitting weights or a usable tokenizer; more token ids than the model has;
            a file that is not there or cannot be read; too little data; a file where the run's folder should be.
    """
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise ConfigError([Problem("name", f"{config.run_dir} must be a folder, and is a file")])
    if config.model.path is not None:
        HfFolder(config.model.path, config.model.architecture).check("lm")
    tokenizer = load_tokenizer(config.model.path, config.alphabet)
    problems = list(tokenizer_problems(config.model, tokenizer))
    if problems:
        raise ConfigError(problems)
    files = config.data
    source = _source(config, "files", files.files, tokenizer)
    train: SampleSource = source
    held_out: SampleSource | None = None
    if files.held_out_share:
        train, held_out = hold_out(source, files.held_out_share, config.seed)
    elif files.held_out_files:
        held_out = _source(config, "held_out_files", files.held_out_files, tokenizer)
    packs = _packs(config, train, config.seed)
    notes = [f"{len(train)} samples to train on, {packs.num_tokens} tokens in {len(packs)} packs"]
    if held_out is not None:
        notes.append(f"{len(held_out)} samples held out, {held_out.lengths.sum()} tokens")
    if isinstance(source, Paragraphs) and source.num_unknown:
        notes.append(f"{source.num_unknown} tokens are unknown to the tokenizer, and are not learned")
    return SFTData(tokenizer, packs, None if held_out is None else _packs(config, held_out, None), tuple(notes))


def _packs(config: SFTConfig, source: SampleSource, seed: int | None) -> PackedDataset:
    return PackedDataset(
        source,
        micro_bsz=config.micro_bsz,
        seq_len=config.seq_len,
        use_packed_dataset=config.use_packed_dataset,
        seed=seed,
        vocab_size=config.model.architecture.vocab_size,
    )


def _source(
    config: SFTConfig, setting: str, patterns: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> SampleSource:
    paths = _matches(setting, patterns)
    match config.data.kind:
        case "text":
            return Paragraphs(paths, tokenizer)
        case "conversations":
            return TextFiles(paths, tokenizer)
        case "tokenized":
            if len(paths) > 1:
                found = ", ".join(map(str, paths))
                raise ConfigError(
                    [Problem(f"data.{setting}", f"tokenized data are one folder or .bin file; got {found}")]
                )
            return TokenizedFolder(paths[0])


def _matches(setting: str, patterns: Sequence[str]) -> list[Path]:
    """The paths that `patterns` stand for, each once, those of one pattern sorted."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        found = [pattern] if Path(pattern).exists() else sorted(glob(pattern, recursive=True))
        if not found:
            raise ConfigError([Problem(f"data.{setting}", f"nothing is at {pattern!r}")])
        paths |= dict.fromkeys(map(Path, found))
    return list(paths)
