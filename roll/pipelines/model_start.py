"""The tokenizer that a run's model comes with, and the folder of a model that starts from random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.config import ConfigError, ModelConfig, ModelSource, Problem
from roll.data.tokenizer import build_char_tokenizer
from roll.data.tokenizer_folder import load_tokenizer

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_of(model: ModelSource, alphabet: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder, or for an architecture alone one of the characters of `alphabet`.

    Raises ConfigError, with paths that begin at the model's own, if there is none that fits the model.
    """
    if model.path is not None:
        return tokenizer_in("path", model.path, model.architecture, trust_remote_code=model.trust_remote_code)
    tokenizer, config = build_char_tokenizer(alphabet), model.architecture
    problems = list(_vocabulary_problems("config.vocab_size", config, tokenizer))
    for name in SPECIAL_IDS:  # null leaves the choice to the tokenizer; `write_untrained_model` fills it in.
        ours, theirs = getattr(config, name), getattr(tokenizer, name)
        if ours is not None and ours != theirs:
            problems.append(Problem(f"config.{name}", f"{ours} is not the tokenizer's, which is {theirs}"))
    if problems:
        raise ConfigError(problems)
    return tokenizer


def tokenizer_in(setting: str, folder: Path, model: ModelConfig, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, which `setting` names.

    Raises ConfigError if there is none that fits the model.
    """
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ConfigError([Problem(setting, str(error))]) from error
    problems = list(_vocabulary_problems(setting, model, tokenizer))
    if problems:
        raise ConfigError(problems)
    return tokenizer


def _vocabulary_problems(setting: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    if len(tokenizer) > model.vocab_size:
        yield Problem(setting, f"{model.vocab_size} ids are less than the tokenizer's {len(tokenizer)} tokens")


def write_untrained_model(folder: Path, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """A Hugging Face folder without weights: config.json with the tokenizer's special ids, and the tokenizer."""
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(model.model_copy(update=ids).to_hf_dict(), indent=2))
