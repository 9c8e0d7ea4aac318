"""A run's prompts, made and checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from roll.checkpoint.tensor_sources import HfFolder
from roll.config import ConfigError
from roll.data.prompts import encode_answers, encode_prompts, uses_template
from roll.data.tasks import ReasoningTask, load_reward_function
from roll.pipelines.data_flow import check_data_flow
from roll.pipelines.end_tokens import end_token_ids
from roll.pipelines.model_start import tokenizer_in
from roll.pipelines.rl_config import RLConfig
from roll.pipelines.run_folder import run_folder_problems
from roll.pipelines.seams import seam_problems
from roll.pipelines.sft_data import SFTData, load_sft_data
from roll.pipelines.warm_start import find_model, held_out_problems, learned_items
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
    end_token_ids: tuple[int, ...]
    """Tokens of which each ends a response."""
    from_template: bool = False
    """True if the tokenizer's chat template has written the prompts."""
    warm_start: SFTData | None = None
    """What the warm start learns from, if it has to run first."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the data, in sentences."""
        notes = []
        if self.from_template:
            notes.append(
                "a prompt is a turn of the tokenizer's chat template; task.chat_template=none is the bare text"
            )
        if len(self.end_token_ids) > 1:
            ends = (f"{one} {self.tokenizer.decode([one])!r}" for one in self.end_token_ids)
            notes.append(f"a response ends at any of the tokens {', '.join(ends)}")
        return tuple(notes)


def load_prompt_data(config: RLConfig) -> PromptData:
    """Build the task and encode its prompts; a mistake in the settings, or in what they name, shows here.

    Raises:
        ValueError: no such task, reward function or environment; an algorithm that reads what nothing makes; an engine
            that has to sleep and cannot; a model folder without fitting weights or a usable tokenizer; a prompt that is
            too long or has characters that the tokenizer does not know; an end token that it does not have; a run's
            folder that cannot be written to; a warm start that cannot run, whose folder holds another run, that learns
            held-out problems, or whose answers are too long for a response.
    """
    check_data_flow(config)
    problems = list(run_folder_problems(config.run_dir))
    load_reward_function(config.reward.function)
    problems += seam_problems(config.rollout, config.reward)
    task = ReasoningTask.of(config.task, "task")
    learned = learned_items(config, task)
    problems += held_out_problems(learned, task)
    if problems:
        raise ConfigError(problems)
    model, warm_start = find_model(config), None
    if model is not None:
        HfFolder(model, config.architecture).check("lm")
        setting = "model_path" if config.warm_start is None else "warm_start"
        tokenizer = tokenizer_in(setting, model, config.architecture, trust_remote_code=config.trusts_remote_code)
    else:
        assert config.warm_start is not None, "there is one where there is no model"
        try:
            warm_start = load_sft_data(config.warm_start)
        except ConfigError as error:
            raise error.under("warm_start") from error
        tokenizer = warm_start.tokenizer
    if config.warm_start is not None and config.warm_start.data.task is not None:
        form = config.warm_start.data.task.chat_template
        # What is learned must fit into a response.
        encode_answers(learned, tokenizer, config.rollout.max_new_tokens, form)
    form = config.task.chat_template
    train, held_out = (
        encode_prompts(items, tokenizer, config.task.max_prompt_tokens, form) for items in (task.train, task.eval)
    )
    ends, from_template = end_token_ids(config, tokenizer), uses_template(tokenizer, form)
    return PromptData(task, tokenizer, train, held_out, ends, from_template, warm_start)
