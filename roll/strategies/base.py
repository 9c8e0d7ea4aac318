"""What every strategy can do, whatever holds its model.

A strategy is given settings, and batches; it never sees the worker, pipeline or launcher around it. Legend: B rows,
S padded length, b rows of one micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from roll.config import Head, StrategySettings
from roll.errors import UserError
from roll.protocol import DataProto


@dataclass(frozen=True)
class ModelOutput:
    """What the model made of one micro-batch, as a loss or forward function gets it.

    Its content is the strategy's own affair (logits, or hidden states that are not logits yet); ask the strategy's
    `op_compute_*` for results per token.
    """

    tensor: Tensor


ForwardFunc = Callable[[DataProto, ModelOutput], dict[str, Tensor]]
"""(micro-batch, output) to named results, each `[b, ...]`."""

LossFunc = Callable[[DataProto, ModelOutput], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, output) to (loss, metrics).

The loss is the sum over this micro-batch's tokens of a per-token loss already divided by the step's global normaliser
(`data.normalizers`). Metrics likewise are parts of a sum over micro-batches and data-parallel ranks.
"""

Metrics = dict[str, float]


def check_response_mask(batch: DataProto) -> None:
    """Raise ValueError if the batch does not say which tokens are learned from."""
    if "response_mask" not in batch.tensors:
        raise UserError("a training batch needs `response_mask`: which tokens are learned from")


class InferenceStrategy(ABC):
    """Runs a model forward over whole batches."""

    def __init__(self, settings: StrategySettings) -> None:
        self.settings = settings

    @abstractmethod
    def initialize(self) -> None:
        """Build the model and load its weights. Collective over all ranks."""

    @abstractmethod
    def get_data_input(self, batch: DataProto, keys: Sequence[str] | None = None) -> DataProto:
        """The batch as every rank of the model-parallel group needs it, from what the group's leader was given.

        Args:
            keys: the tensors that are wanted; None for all.

        Raises:
            ValueError: the leader's batch is not a valid model batch; on every rank of the group alike.
        """

    @abstractmethod
    def forward_step(self, batch: DataProto, forward_func: ForwardFunc) -> dict[str, Tensor] | None:
        """Run `forward_func` over the batch without gradients, micro-batch by micro-batch.

        Returns:
            Its results for all rows, `[B, ...]` in the order of the batch; None on ranks that do not report.
        """

    @abstractmethod
    def op_compute_log_probs(self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Log-probabilities of the given tokens at the rollout temperature.

        Args:
            input_ids: `[b, S]`.
            attention_mask: `[b, S]`, 1 on tokens whose log-prob is wanted.

        Returns:
            `[b, S-1]` fp32: at index t that of token t+1, zero where `attention_mask[:, t+1]` is 0.
        """

    @abstractmethod
    def op_compute_entropy(self, output: ModelOutput, attention_mask: Tensor) -> Tensor:
        """Entropy, in nats, of the distribution that token t+1 was drawn from: `[b, S-1]`, masked likewise."""

    @abstractmethod
    def op_compute_log_probs_and_entropy(
        self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both at once, for the price of one pass over the vocabulary."""

    @abstractmethod
    def op_compute_row_logits(self, output: ModelOutput) -> Tensor:
        """Logits at temperature 1 of all tokens at their rows: `[b, S, V]`, zero on padding.

        Where the vocabulary is split over tp, a rank has its part: `[b, S, V/tp]`. This is the largest tensor of a
        micro-batch; the other `op_compute_*` never make it as a whole. Raises ValueError for a model with a value head.
        """

    @abstractmethod
    def op_compute_values(self, output: ModelOutput, attention_mask: Tensor) -> Tensor:
        """Values of a model with a value head: `[b, S-1]`, at index t that of the state before token t+1."""


def check_has_logits(head: Head) -> None:
    """Raise ValueError for a model whose head is not the vocabulary's."""
    if head != "lm":
        raise UserError(f"a model with head {head!r} has no logits")


class TrainStrategy(InferenceStrategy):
    """Also takes optimizer steps."""

    @abstractmethod
    def train_step(self, batch: DataProto, loss_func: LossFunc) -> Metrics:
        """One optimizer step over the batch of all data-parallel ranks, accumulated over micro-batches.

        A batch without a single response token changes nothing. It has no loss, and reports `lr` and `skipped_steps` 1.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `skipped_steps` and the sums of the loss function's metrics;
            complete on ranks that report.
        """

    @abstractmethod
    def model_update(self, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
        """The weights in Hugging Face layout, as buckets of (name, whole tensor) of about `bucket_bytes`.

        Collective over all ranks. Each pipeline stage yields its own layers; all of its ranks get the tensors.
        """

    @abstractmethod
    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimizer and schedule. Collective; the folder appears when it is complete.

        Raises:
            ValueError: writing it would delete anything but an older checkpoint; nothing has been written.
        """

    @abstractmethod
    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from `save_checkpoint`, under these or other degrees. Collective.

        The checkpoint replaces the progress of this strategy: weights, moments, and the steps that optimizer and
        schedule have taken, whatever the strategy did before. The settings of this run hold; a warning names those of
        `optimizer` that were others, old and new.

        Raises:
            ValueError: it is incomplete or damaged, or of an earlier version or another model; on every rank alike.
                Nothing has been changed, except where a file of tensors is damaged: weights may be replaced in part.
        """

    @abstractmethod
    def save_hf(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder, with the tokenizer of the folder they came from. Collective.

        Raises:
            ValueError: writing it would delete anything but an older model folder; nothing has been written.
        """
