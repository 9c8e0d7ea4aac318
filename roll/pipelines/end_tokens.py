"""Tokens that end a response: one set for generation, masks and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.config import ConfigError, Problem
from roll.config.generation import end_token_ids_in
from roll.pipelines.rl_config import RLConfig
from roll.pipelines.warm_start import find_model

SETTING = "rollout.end_tokens"


def end_token_ids(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of `rollout.end_tokens`; where it is null, those that the model's folder and the tokenizer name.

    Raises ConfigError for a token that the tokenizer does not have, a folder's file that cannot be read, and where
    nothing names an end token.
    """
    if config.rollout.end_tokens is not None:
        return _named(config.rollout.end_tokens, tokenizer)
    found: dict[int, None] = {} if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id): None}
    folders = tuple(_folders(config))
    for folder in folders:
        ids = end_token_ids_in(folder, config.architecture.family.key("eos_token_id") or "eos_token_id")
        outside = [one for one in ids if one >= config.architecture.vocab_size]
        if outside:
            limit = f"below vocab_size {config.architecture.vocab_size}"
            raise ConfigError([Problem(str(folder), f"its eos_token_id names {outside[0]}, which is not {limit}")])
        found |= dict.fromkeys(ids)
    if not found:
        files = "no generation_config.json or config.json an eos_token_id"
        where = f" in {' or '.join(map(str, folders))}" if folders else ""
        message = f"name a token that ends a response: the tokenizer has no eos_token, and {files}{where}"
        raise ConfigError([Problem(SETTING, message)])
    return tuple(found)


def _folders(config: RLConfig) -> Iterator[Path]:
    """The model's folder, and that of the model which a warm start fine-tunes: it has the same end tokens."""
    model = find_model(config)
    if model is not None:
        yield model
    if config.warm_start is not None and config.warm_start.model.path is not None:
        yield config.warm_start.model.path


def _named(tokens: Sequence[int | str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    vocabulary = tokenizer.get_vocab()
    known, problems = set(vocabulary.values()), []
    found: dict[int, None] = {}
    for token in tokens:
        token_id = token if isinstance(token, int) else _id_of(token, vocabulary, tokenizer)
        if token_id is None or token_id not in known:
            problems.append(Problem(SETTING, f"{token!r} is not one token of the tokenizer, which has {len(known)}"))
        else:
            found[token_id] = None
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _id_of(text: str, vocabulary: dict[str, int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that is called `text`, or the one that is read from it: byte-level vocabularies rename white space."""
    if text in vocabulary:
        return vocabulary[text]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None
