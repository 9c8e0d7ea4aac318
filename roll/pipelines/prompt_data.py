"""A run's prompts, made and checked before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ConfigError, ModelConfig, ModelSource, PPOConfig, Problem
from roll.data.prompts import encode_prompts, encode_supervised
from roll.data.tasks import ReasoningTask, load_reward_function
from roll.data.tokenizer import build_char_tokenizer
from roll.protocol import DataProto

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class PromptData:
    """What a run asks: the task's items, and its prompts as token ids."""

    task: ReasoningTask
    tokenizer: PreTrainedTokenizerBase
    train: DataProto
    """All training prompts, `[train_size, max_prompt_tokens]`."""
    held_out: DataProto
    """All held-out prompts, `[eval_size, max_prompt_tokens]`."""
    supervised: DataProto | None
    """All training prompts with their answers, `[train_size, max_prompt_tokens + max_new_tokens]`, for a warm start."""


def load_prompt_data(config: PPOConfig) -> PromptData:
    """Build the task and encode its prompts; a mistake in the settings, or in what they name, shows here.

    Raises:
        ValueError: no such task or reward function; a model folder without fitting weights or a usable tokenizer;
            special ids that are not the tokenizer's; more token ids than the model has; a prompt that is too long or
            has characters that the tokenizer does not know; with a warm start, an answer likewise, or none at all; a
            file where the run's folder should be.
    """
    problems = list(_files_in_the_way(config))
    load_reward_function(config.reward.function)
    task = ReasoningTask(
        config.task.name,
        config.task.params,
        train_size=config.task.train_size,
        eval_size=config.task.eval_size,
        seed=config.seed,
        prompt_template=config.task.prompt,
    )
    if config.model.path is not None:
        HfFolder(config.model.path, config.model.architecture).check("lm")
    tokenizer = load_tokenizer(config.model.path)
    problems += tokenizer_problems(config.model, tokenizer)
    if problems:
        raise ConfigError(problems)
    length, new_tokens = config.task.max_prompt_tokens, config.rollout.max_new_tokens
    has_warm_start = config.warm_start is not None
    return PromptData(
        task,
        tokenizer,
        encode_prompts(task.train, tokenizer, length),
        encode_prompts(task.eval, tokenizer, length),
        encode_supervised(task.train, tokenizer, length, new_tokens) if has_warm_start else None,
    )


def _files_in_the_way(config: PPOConfig) -> Iterator[Problem]:
    for setting, folder in (("output_dir", config.output_dir), ("name", config.run_dir)):
        if folder.exists() and not folder.is_dir():
            yield Problem(setting, f"{folder} must be a folder, and is a file")


def load_tokenizer(folder: Path | None, alphabet: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder, or of characters where there is none. Raises ConfigError naming the folder."""
    if folder is None:
        return build_char_tokenizer(alphabet)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:  # transformers raises either, without saying which setting it is about.
        raise ConfigError([Problem("model.path", f"{folder} has no usable tokenizer: {error}")]) from error


def tokenizer_problems(model: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    """What does not fit between the model and its tokenizer."""
    vocab_size = model.architecture.vocab_size
    if len(tokenizer) > vocab_size:
        yield Problem("model.config.vocab_size", f"{vocab_size} is less than the tokenizer's {len(tokenizer)} tokens")
    if tokenizer.eos_token_id is None:
        yield Problem("model.path", f"the tokenizer of {model.path} has no eos_token, which ends a response")
    if model.config is None:
        return
    for name in SPECIAL_IDS:  # null leaves the choice to the tokenizer; `write_untrained_model` fills it in.
        ours, theirs = getattr(model.config, name), getattr(tokenizer, name)
        if ours is not None and ours != theirs:
            yield Problem(f"model.config.{name}", f"{ours} is not the tokenizer's, which is {theirs}")


def write_untrained_model(folder: Path, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """A Hugging Face folder without weights: config.json with the tokenizer's special ids, and the tokenizer."""
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(model.model_copy(update=ids).to_hf_dict(), indent=2))
