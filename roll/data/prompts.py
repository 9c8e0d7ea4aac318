"""Task items as token ids: prompts for a rollout, answers to learn from, and the order in which prompts are drawn.

B rows, P = max_prompt_tokens. Prompts are padded on the left and end at column P - 1. A prompt is a user's turn in the
tokenizer's chat template, which also writes conversations to learn from; `chat_template` is the setting of a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roll.config import PromptForm
from roll.data.sources.chat_template import ChatTemplate, Conversation
from roll.data.sources.conversation import conversation_texts, plain_text
from roll.data.sources.learned_text import EncodedText, encode_learned
from roll.data.sources.row_keys import check_nothing_lost
from roll.data.special_tokens import encode_text, front_tokens
from roll.data.tasks import TaskItem
from roll.data.tokenizer import check_characters, padding_id
from roll.errors import UserError
from roll.protocol import DataProto


def uses_template(tokenizer: PreTrainedTokenizerBase, chat_template: PromptForm) -> bool:
    """Tell whether prompts are written by the tokenizer's chat template."""
    return chat_template == "auto" and tokenizer.chat_template is not None


def encode_prompts(
    items: Sequence[TaskItem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    chat_template: PromptForm = "auto",
) -> DataProto:
    """Prompts of a batch: `input_ids` and `attention_mask` [B, P] int64, and per row `prompt` (str), `entry` (dict).

    Raises ValueError as `prompt_ids` does.
    """
    prompts = prompt_ids(items, tokenizer, max_prompt_tokens, chat_template)
    pad = padding_id(tokenizer)
    rows = [[pad] * (max_prompt_tokens - len(ids)) + ids for ids in prompts]
    masks = [[0] * (max_prompt_tokens - len(ids)) + [1] * len(ids) for ids in prompts]
    tensors = {"input_ids": _matrix(rows, max_prompt_tokens), "attention_mask": _matrix(masks, max_prompt_tokens)}
    return DataProto.from_dict(tensors, _row_objects(items))


def prompt_ids(
    items: Sequence[TaskItem],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    chat_template: PromptForm = "auto",
) -> list[list[int]]:
    """Token ids of each prompt.

    A chat template writes special tokens itself, so none is added: the ids are those of
    `apply_chat_template(add_generation_prompt=True)`. Bare text gets what the tokenizer puts in front (e.g. `<s>`),
    once, also where the prompt has it. What the tokenizer would put behind a prompt is left out.

    Raises ValueError for a prompt that is empty, longer than `max_prompt_tokens`, not in the tokenizer's alphabet,
    refused by the chat template or left out by it.
    """
    if uses_template(tokenizer, chat_template):
        texts, front = _template_prompts(items, tokenizer), []
    else:
        texts, front = [item.prompt for item in items], front_tokens(tokenizer)
    check_characters(texts, tokenizer, what="prompts")
    prompts = [encode_text(text, tokenizer, front) for text in texts]
    for index, ids in enumerate(prompts):
        if not ids:
            raise UserError(f"prompt {index} is empty: there is no token to continue from")
        if len(ids) > max_prompt_tokens:
            raise UserError(
                f"prompt {index} has {len(ids)} tokens, max_prompt_tokens is {max_prompt_tokens}: "
                f"{items[index].prompt!r}"
            )
    return prompts


def _template_prompts(items: Sequence[TaskItem], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that a model is asked to continue, each with one user's turn."""
    template, texts = ChatTemplate(tokenizer), []
    for index, item in enumerate(items):
        conversation = Conversation([{"role": "user", "content": item.prompt}], f"prompt {index}")
        check_nothing_lost(template, conversation, template.text(conversation))
        texts.append(template.prompt(conversation))
    return texts


def encode_answers(
    items: Sequence[TaskItem],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int | None = None,
    chat_template: PromptForm = "auto",
) -> list[EncodedText]:
    """Tokens of each prompt with its answer and the end token, of which answer and end token are learned.

    Prompt and answer are tokenized as one text: one turn of the chat template, or bare text and the end token.

    Raises ValueError for an item without an answer, one that is longer than `max_new_tokens` with its end token, or not
    in the tokenizer's alphabet, for a tokenizer without offsets, and as `encode_conversations` does.
    """
    templated = uses_template(tokenizer, chat_template)
    if items and tokenizer.eos_token_id is None and not templated:
        raise UserError(
            "the tokenizer has no eos_token, which ends an answer to learn: name one in its tokenizer_config.json"
        )
    pairs = []
    for index, item in enumerate(items):
        if item.answer is None:
            raise UserError(f"item {index} has no answer to learn from: its task names no single one")
        pairs.append((f"problem {index}", {"prompt": item.prompt, "response": item.answer}))
    check_characters((pair["response"] for _, pair in pairs), tokenizer, what="answers")
    if templated:
        texts = conversation_texts(pairs, tokenizer)
    else:
        texts = [plain_text(pair["prompt"], pair["response"], tokenizer, origin) for origin, pair in pairs]
    encoded = encode_learned(texts, tokenizer)
    for index, (_, in_loss) in enumerate(encoded):
        if max_new_tokens is not None and sum(in_loss) > max_new_tokens:
            raise UserError(
                f"answer {index} has {sum(in_loss)} tokens with its end token, max_new_tokens is {max_new_tokens}: "
                f"{items[index].answer!r}"
            )
    return encoded


class PromptSampler:
    """An endless stream of batches of item indices: each epoch is a new shuffle of all items, none is left out.

    A batch may cross into the next epoch. The order follows from `seed` and the epoch alone, so the state is two
    numbers, and a sampler that is loaded from it continues as if it had never stopped, even with another batch size.

    Raises ValueError when `batch_size` is not in 1..num_items, or the seed is negative.
    """

    def __init__(self, num_items: int, batch_size: int, seed: int) -> None:
        if not 1 <= batch_size <= num_items:
            raise UserError(f"batch_size must be between 1 and num_items = {num_items}, got {batch_size}")
        if seed < 0:
            raise UserError(f"seed must not be negative, got {seed}")
        self.num_items = num_items
        self.batch_size = batch_size
        self.seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffle(0)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """The next `batch_size` indices."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            if self._position == self.num_items:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffle(self._epoch)
            taken = self._order[self._position : self._position + self.batch_size - len(batch)]
            self._position += len(taken)
            batch.extend(taken)
        return batch

    def state_dict(self) -> dict[str, int]:
        """The place in the stream, and what it is a place in (all JSON numbers)."""
        return {"num_items": self.num_items, "seed": self.seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved place. Raises ValueError if it belongs to another number of items or seed."""
        for name in ("num_items", "seed"):
            if state[name] != getattr(self, name):
                raise UserError(f"the saved {name} is {state[name]}, this sampler's is {getattr(self, name)}")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffle(self._epoch)

    def _shuffle(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self.seed, epoch]).permutation(self.num_items).tolist()
        return order


def _matrix(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def _row_objects(items: Sequence[TaskItem]) -> dict[str, np.ndarray]:
    return {
        "prompt": _object_array([item.prompt for item in items]),
        "entry": _object_array([item.entry for item in items]),
    }


def _object_array(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
