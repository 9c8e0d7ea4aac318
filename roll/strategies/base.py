"""What every strategy can do, whatever holds its model.

A strategy is given settings, and batches; it never sees the worker, pipeline or launcher around it. Legend: B rows,
S padded length, b rows of one micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from roll.config import StrategySettings
from roll.errors import UserError
from roll.protocol import DataProto
from roll.strategies.output import ForwardFunc, LossFunc, ModelOutput

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

    def op_compute_log_probs(self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`output.log_probs`, under the name that ROLL has for it, like those below."""
        return output.log_probs(input_ids, attention_mask)

    def op_compute_entropy(self, output: ModelOutput, attention_mask: Tensor) -> Tensor:
        """`output.entropy`."""
        return output.entropy(attention_mask)

    def op_compute_log_probs_and_entropy(
        self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`output.log_probs_and_entropy`."""
        return output.log_probs_and_entropy(input_ids, attention_mask)

    def op_compute_values(self, output: ModelOutput, attention_mask: Tensor) -> Tensor:
        """`output.values`."""
        return output.values(attention_mask)

    def op_compute_logits(self, output: ModelOutput) -> Tensor:
        """`output.logits`."""
        return output.logits()

    def op_compute_row_logits(self, output: ModelOutput) -> Tensor:
        """`output.row_logits`."""
        return output.row_logits()


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
            ValueError: it is incomplete or damaged, or of another model; on every rank alike.
                Nothing has been changed, except where a file of tensors is damaged: weights may be replaced in part.
        """

    @abstractmethod
    def save_hf(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face folder, with the tokenizer of the folder they came from. Collective.

        Raises:
            ValueError: writing it would delete anything but an older model folder; nothing has been written.
        """


def different_names(parts: Iterable[Iterable[str]]) -> str:
    """The message about micro-batches whose metrics have different names."""
    kinds = sorted({", ".join(sorted({*part} - {"loss"})) or "none" for part in parts})
    return f"a loss has the same metrics in all micro-batches on all ranks; this rank has {' and '.join(kinds)}"
