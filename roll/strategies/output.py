"""Answers of a model about one micro-batch: all that a loss or forward function sees of the model.

Legend: b rows of the micro-batch, S padded length, V vocabulary, tp ranks that share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from roll.config import Head
from roll.errors import UserError
from roll.protocol import DataProto


class ModelOutput(ABC):
    """Answers of a model about one micro-batch, the same however the model is split.

        def loss(data: DataProto, output: ModelOutput) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs = output.log_probs(data["input_ids"], data["response_mask"])
            return -log_probs.sum() / data.normalizers.tokens, {}

    All ranks that share the batch get the answers for all of its tokens, but for `logits`. Gradients flow through every
    answer. An output is for one micro-batch and is dropped with it.

    A pass over the vocabulary is what costs. `log_probs` and `entropy` take one each, `log_probs_and_entropy` takes one
    for both. The output keeps entropies, and the log-probs of the tensor `input_ids` that was asked about last, so that
    several terms of a loss can ask again for nothing.
    """

    @abstractmethod
    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Log-probabilities of the given tokens at the rollout temperature.

        Args:
            input_ids: `[b, S]` int64.
            attention_mask: `[b, S]`, 1 on tokens whose log-prob is wanted.

        Returns:
            `[b, S-1]` fp32: at index t that of token t+1, zero where `attention_mask[:, t+1]` is 0.

        Raises:
            ValueError: the model has a value head.
        """

    @abstractmethod
    def entropy(self, attention_mask: Tensor) -> Tensor:
        """Entropy, in nats, of the distribution that token t+1 was drawn from: `[b, S-1]`, masked likewise.

        Raises ValueError for a model with a value head.
        """

    @abstractmethod
    def log_probs_and_entropy(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """`log_probs` and `entropy`, for the price of one pass over the vocabulary."""

    @abstractmethod
    def values(self, attention_mask: Tensor) -> Tensor:
        """Values of a model with a value head: `[b, S-1]` fp32, at index t that of the state before token t+1.

        Zero where `attention_mask[:, t+1]` is 0. Raises ValueError for a model with the vocabulary's head.
        """

    @abstractmethod
    def logits(self) -> Tensor:
        """Logits at temperature 1 of the rows' real tokens, one row after the other: `[1, T, V]`.

        Of a split model a rank has its own part: its tokens of the sequence, its part of the vocabulary
        (`[1, T/n, V/tp]`; see `PackedOutput`). Raises ValueError for a model with a value head.
        """

    @abstractmethod
    def row_logits(self) -> Tensor:
        """Logits at temperature 1 of all tokens at their rows: `[b, S, V]`, zero on padding.

        Where the vocabulary is split over tp, a rank has its part: `[b, S, V/tp]`. This is the largest tensor of a
        micro-batch; `log_probs`, `entropy` and `values` never make it as a whole. Raises ValueError for a model with a
        value head.
        """


ForwardFunc = Callable[[DataProto, ModelOutput], dict[str, Tensor]]
"""(micro-batch, output) to named results, each `[b, ...]`."""

Loss = tuple[Tensor, dict[str, Tensor]]
"""A loss, and metrics by name."""

LossFunc = Callable[[DataProto, ModelOutput], Loss]
"""(micro-batch, output) to (loss, metrics).

The loss is the sum over this micro-batch's tokens of a per-token loss already divided by the step's global normaliser
(`data.normalizers`). Metrics likewise are parts of a sum over micro-batches and data-parallel ranks.
"""


_ANSWERS_OF: dict[Head, str] = {"lm": "logits, log-probs or entropies", "value": "values"}


def check_head(head: Head, needed: Head) -> None:
    """Raise ValueError if a model with `head` is asked for an answer of head `needed`."""
    if head != needed:
        raise UserError(f"a model with head {head!r} has no {_ANSWERS_OF[needed]}; one with head {needed!r} has")
