"""Solved problems, of which the answers are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from roll.config import PromptForm
from roll.data.prompts import encode_answers, prompt_ids
from roll.data.sources.sample import Ids, Sample
from roll.data.tasks import TaskItem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TaskAnswers:
    """Task items in their order: the prompt as a rollout reads it, then what is learned, the answer and its end token.

    Example: the prompt "1+" as `[5, 15]` with the answer "2" is `[5, 15, 6, 2]`, learned `[False, False, True, True]`.
    """

    def __init__(
        self,
        items: Sequence[TaskItem],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        chat_template: PromptForm = "auto",
    ) -> None:
        """Tokenize all items. Raises ValueError as `prompt_ids` and `encode_answers` do."""
        prompt_ids(items, tokenizer, max_prompt_tokens, chat_template)  # No prompt is longer than a rollout takes.
        encoded = encode_answers(items, tokenizer, chat_template=chat_template)
        self._samples = [(np.array(ids, np.int64), np.array(in_loss, np.bool_)) for ids, in_loss in encoded]
        self._lengths = np.array([len(ids) for ids, _ in self._samples], np.int64)

    @property
    def lengths(self) -> Ids:
        """`[len]` int64."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return Sample(*self._samples[index], f"problem {index}")
