"""A supervised run's packs, planned and checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ConfigError, Problem, SFTConfig
from roll.data.packed_dataset import PackedDataset
from roll.data.sources.sample import SampleSource
from roll.data.unpack import count_without_label
from roll.pipelines.model_start import tokenizer_of
from roll.pipelines.run_folder import run_folder_problems
from roll.pipelines.sft_sources import open_sources


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
            a file that is not there or cannot be read; too little data, or none with a label; a run's folder that
            cannot be written to.
    """
    if problems := list(run_folder_problems(config.run_dir)):
        raise ConfigError(problems)
    if config.model.path is not None:
        HfFolder(config.model.path, config.model.architecture).check("lm")
    try:
        tokenizer = tokenizer_of(config.model, config.alphabet)
    except ConfigError as error:
        raise error.under("model") from error
    sources = open_sources(config, tokenizer)
    train = _packs(config, "to train on", sources.train, config.seed)
    held_out = None if sources.held_out is None else _packs(config, "held out", sources.held_out, None)
    notes = [f"{len(sources.train)} samples to train on, {train.num_tokens} tokens in {len(train)} packs"]
    notes += _unlearned(config, "to train on", sources.train)
    if sources.held_out is not None:
        notes.append(f"{len(sources.held_out)} samples held out, {sources.held_out.lengths.sum()} tokens")
        notes += _unlearned(config, "held out", sources.held_out)
    return SFTData(tokenizer, train, held_out, (*notes, *sources.notes))


def _unlearned(config: SFTConfig, what: str, source: SampleSource) -> list[str]:
    """A note on the samples of which nothing is learned. Raises ConfigError if that is all of them."""
    if config.use_packed_dataset:
        return []  # Packs cut no label off.
    number, of = count_without_label(source, config.seq_len), int((source.lengths > 0).sum())
    if number == of:
        found = f"{config.seq_len} tokens are filled by the prompt of each of the {of} samples {what}"
        raise ConfigError([Problem("seq_len", f"{found}, so none has a label")])
    return [f"{number} of {of} samples {what} have no label: their prompts fill seq_len {config.seq_len}"] * bool(
        number
    )


def _packs(config: SFTConfig, what: str, source: SampleSource, seed: int | None) -> PackedDataset:
    if not source.lengths.sum():
        patterns = config.data.held_out_files if what == "held out" else []
        files = ", ".join(patterns or config.data.files)
        raise ConfigError([Problem("data", f"the {len(source)} samples {what} hold no token: {files}")])
    return PackedDataset(
        source,
        micro_bsz=config.micro_bsz,
        seq_len=config.seq_len,
        use_packed_dataset=config.use_packed_dataset,
        seed=seed,
        vocab_size=config.model.architecture.vocab_size,
    )
