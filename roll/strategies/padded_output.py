"""Answers of a model in one process, run on padded rows as they are: the reference for `PackedOutput`.

Legend: b rows, S padded length, V vocabulary.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from roll.config import Head
from roll.strategies.output import ModelOutput, check_head


class PaddedOutput(ModelOutput):
    """Answers from the logits or values of all positions, padding among them."""

    def __init__(self, tensor: Tensor, mask: Tensor, *, head: Head, temperature: float) -> None:
        """
        Args:
            tensor: logits `[b, S, V]` at temperature 1 for head `lm`, values `[b, S]` for head `value`.
            mask: `[b, S]` bool: the real tokens.
            temperature: of log-probs and entropies.
        """
        self.tensor = tensor
        self.mask = mask
        self.head = head
        self.temperature = temperature

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        check_head(self.head, "lm")
        targets = torch.where(self._wanted(attention_mask), input_ids[:, 1:], 0)
        log_probs = self._log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return self._where_wanted(log_probs, attention_mask)

    def entropy(self, attention_mask: Tensor) -> Tensor:
        check_head(self.head, "lm")
        return self._where_wanted(self._entropy, attention_mask)

    def log_probs_and_entropy(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.log_probs(input_ids, attention_mask), self.entropy(attention_mask)

    def values(self, attention_mask: Tensor) -> Tensor:
        check_head(self.head, "value")
        return self._where_wanted(self.tensor[:, :-1], attention_mask)

    def logits(self) -> Tensor:
        check_head(self.head, "lm")
        return self.tensor[self.mask].unsqueeze(0)

    def row_logits(self) -> Tensor:
        check_head(self.head, "lm")
        return torch.where(self.mask.unsqueeze(-1), self.tensor, 0.0)

    @cached_property
    def _log_softmax(self) -> Tensor:
        """`[b, S-1, V]` fp32 at the temperature."""
        return (self.tensor[:, :-1].float() / self.temperature).log_softmax(dim=-1)

    @cached_property
    def _entropy(self) -> Tensor:
        """`[b, S-1]`."""
        return -(self._log_softmax.exp() * self._log_softmax).sum(dim=-1)

    def _wanted(self, attention_mask: Tensor) -> Tensor:
        """`[b, S-1]` bool: token t is real and token t+1 is wanted."""
        return self.mask[:, :-1] & attention_mask[:, 1:].bool()

    def _where_wanted(self, results: Tensor, attention_mask: Tensor) -> Tensor:
        """`[b, S-1]` results where they are wanted, else zero."""
        return torch.where(self._wanted(attention_mask), results, 0.0)
