"""A run's prompts, made and checked before any process starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from roll.config import ConfigError, ModelConfig, PPOConfig, Problem
from roll.data.prompts import encode_prompts
from roll.data.tasks import ReasoningTask, load_reward_function
from roll.data.tokenizer import build_char_tokenizer
from roll.protocol import DataProto


@dataclass(frozen=True)
class PromptData:
    """What a run asks: the task's items, and its prompts as token ids."""

    task: ReasoningTask
    tokenizer: PreTrainedTokenizerBase
    train: DataProto
    """All training prompts, `[train_size, max_prompt_tokens]`."""
    held_out: DataProto
    """All held-out prompts, `[eval_size, max_prompt_tokens]`."""


def load_prompt_data(config: PPOConfig) -> PromptData:
    """Build the task and encode its prompts; a mistake in the settings shows here.

    Raises:
        ValueError: no such task or reward function, a prompt that is too long or has characters that the tokenizer
            does not know, more token ids than the model has.
    """
    load_reward_function(config.reward.function)
    task = ReasoningTask(
        config.task.name,
        config.task.params,
        train_size=config.task.train_size,
        eval_size=config.task.eval_size,
        seed=config.seed,
        prompt_template=config.task.prompt,
    )
    tokenizer = _tokenizer(config.model.path)
    vocab_size = config.model.architecture.vocab_size
    if len(tokenizer) > vocab_size:
        raise ConfigError(
            [Problem("model.config.vocab_size", f"{vocab_size} is less than the tokenizer's {len(tokenizer)} tokens")]
        )
    length = config.task.max_prompt_tokens
    return PromptData(
        task, tokenizer, encode_prompts(task.train, tokenizer, length), encode_prompts(task.eval, tokenizer, length)
    )


def _tokenizer(folder: Path | None) -> PreTrainedTokenizerBase:
    return build_char_tokenizer() if folder is None else AutoTokenizer.from_pretrained(folder)


def write_untrained_model(folder: Path, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """A Hugging Face folder without weights: config.json with the tokenizer's special ids, and the tokenizer."""
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(model.model_copy(update=ids).to_hf_dict(), indent=2))
