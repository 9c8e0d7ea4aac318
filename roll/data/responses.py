"""Rows of a batch from token ids: a prompt, and what continues it.

B rows, P = max_prompt_tokens, N = max_new_tokens. Prompts are padded on the left and end at column P - 1;
what continues them is padded on the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from roll.errors import UserError
from roll.protocol import DataProto


@dataclass
class Continuation:
    """Tokens behind a prompt: those of responses, and of whatever stands between them."""

    token_ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    """Whether each token is learned from."""
    log_probs: list[float] = field(default_factory=list)
    """The log-prob with which each token was sampled; nan for a token that was not."""

    def append(self, token_ids: Sequence[int], *, learned: bool, log_probs: Sequence[float] | None = None) -> None:
        """Add tokens; `log_probs` are those with which they were sampled, if they were and these are known."""
        self.token_ids += token_ids
        self.learned += [learned] * len(token_ids)
        self.log_probs += [math.nan] * len(token_ids) if log_probs is None else log_probs


def as_rows(
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Continuation],
    *,
    with_log_probs: bool,
    max_prompt_tokens: int,
    max_new_tokens: int,
    pad_token_id: int,
) -> DataProto:
    """A batch of prompts and what continues them.

    Returns:
        `input_ids`, `attention_mask` and `response_mask` (1 where tokens are learned from), `[B, P + N]` int64; and
        `with_log_probs`, `rollout_log_probs`, `[B, P + N - 1]` float32: index t speaks of token t + 1, and is 0 where
        that is not learned from, and NaN where it is, but no engine sampled it (a learned turn of an environment).

    Raises:
        ValueError: a prompt has more than P tokens, or a continuation more than N.
    """
    ids, masks, learned, log_probs = [], [], [], []
    for row, (prompt, rest) in enumerate(zip(prompts, continuations, strict=True)):
        before, behind = max_prompt_tokens - len(prompt), max_new_tokens - len(rest.token_ids)
        if before < 0:
            raise UserError(
                f"row {row}: {len(prompt)} prompt tokens are more than max_prompt_tokens {max_prompt_tokens}"
            )
        if behind < 0:
            raise UserError(
                f"row {row}: {len(rest.token_ids)} new tokens are more than max_new_tokens {max_new_tokens}"
            )
        ids.append([pad_token_id] * before + [*prompt, *rest.token_ids] + [pad_token_id] * behind)
        masks.append([0] * before + [1] * (len(prompt) + len(rest.token_ids)) + [0] * behind)
        learned.append([0] * max_prompt_tokens + [*map(int, rest.learned)] + [0] * behind)
        known = [prob if counts else 0.0 for prob, counts in zip(rest.log_probs, rest.learned, strict=True)]
        log_probs.append([0.0] * max_prompt_tokens + known + [0.0] * behind)
    size = len(ids), max_prompt_tokens + max_new_tokens
    tensors = {
        "input_ids": torch.tensor(ids, dtype=torch.int64).reshape(size),
        "attention_mask": torch.tensor(masks, dtype=torch.int64).reshape(size),
        "response_mask": torch.tensor(learned, dtype=torch.int64).reshape(size),
    }
    if with_log_probs:
        tensors["rollout_log_probs"] = torch.tensor(log_probs, dtype=torch.float32).reshape(size)[:, 1:]
    return DataProto.from_dict(tensors)
