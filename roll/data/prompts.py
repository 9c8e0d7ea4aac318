"""Task items as token ids: prompts for a rollout, answers to learn from, and the order in which prompts are drawn.

B rows, P = max_prompt_tokens. Prompts are padded on the left and end at column P - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roll.data.sources.conversation import plain_text
from roll.data.sources.learned_text import EncodedText, encode_learned
from roll.data.special_tokens import encode_text, front_tokens
from roll.data.tasks import TaskItem
from roll.data.tokenizer import check_characters, padding_id
from roll.errors import UserError
from roll.protocol import DataProto


def encode_prompts(items: Sequence[TaskItem], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> DataProto:
    """Prompts of a batch: `input_ids` and `attention_mask` [B, P] int64, and per row `prompt` (str), `entry` (dict).

    Raises ValueError as `prompt_ids` does.
    """
    prompts = prompt_ids(items, tokenizer, max_prompt_tokens)
    pad = padding_id(tokenizer)
    rows = [[pad] * (max_prompt_tokens - len(ids)) + ids for ids in prompts]
    masks = [[0] * (max_prompt_tokens - len(ids)) + [1] * len(ids) for ids in prompts]
    tensors = {"input_ids": _matrix(rows, max_prompt_tokens), "attention_mask": _matrix(masks, max_prompt_tokens)}
    return DataProto.from_dict(tensors, _row_objects(items))


def prompt_ids(
    items: Sequence[TaskItem], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int
) -> list[list[int]]:
    """Token ids of each prompt, with what the tokenizer puts in front (e.g. `<s>`), once, also where the prompt has it.

    What the tokenizer would put behind a prompt is left out.

    Raises ValueError for a prompt that is empty, longer than `max_prompt_tokens`, or not in the tokenizer's alphabet.
    """
    check_characters((item.prompt for item in items), tokenizer, what="prompts")
    front = front_tokens(tokenizer)
    prompts = [encode_text(item.prompt, tokenizer, front) for item in items]
    for index, ids in enumerate(prompts):
        if not ids:
            raise UserError(f"prompt {index} is empty: there is no token to continue from")
        if len(ids) > max_prompt_tokens:
            raise UserError(
                f"prompt {index} has {len(ids)} tokens, max_prompt_tokens is {max_prompt_tokens}: "
                f"{items[index].prompt!r}"
            )
    return prompts


def encode_answers(
    items: Sequence[TaskItem], tokenizer: PreTrainedTokenizerBase, max_new_tokens: int | None = None
) -> list[EncodedText]:
    """Tokens of each prompt with its answer and the end token, of which answer and end token are learned.

    Prompt and answer are tokenized as one text. Raises ValueError for an item without an answer, one that is longer
    than `max_new_tokens` with its end token, or not in the tokenizer's alphabet, and for a tokenizer without offsets.
    """
    if items and tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no eos_token, which ends an answer to learn: name one in its tokenizer_config.json"
        )
    texts, answers = [], []
    for index, item in enumerate(items):
        if item.answer is None:
            raise UserError(f"item {index} has no answer to learn from: its task names no single one")
        answers.append(item.answer)
        texts.append(plain_text(item.prompt, item.answer, tokenizer, f"problem {index}"))
    check_characters(answers, tokenizer, what="answers")
    encoded = encode_learned(texts, tokenizer)
    for index, (_, in_loss) in enumerate(encoded):
        if max_new_tokens is not None and sum(in_loss) > max_new_tokens:
            raise UserError(
                f"answer {index} has {sum(in_loss)} tokens with its end token, max_new_tokens is {max_new_tokens}: "
                f"{answers[index]!r}"
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
