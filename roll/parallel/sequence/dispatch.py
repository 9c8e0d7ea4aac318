"""Letting a transformers model attend over a sequence whose tokens are split over ranks, and undoing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed import ProcessGroup

from roll.errors import UserError
from roll.parallel.sequence.dispatched_model import DispatchedModel, dispatch_of
from roll.parallel.sequence.support import check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def dispatch_modules(model: nn.Module, *, group: ProcessGroup | None = None) -> None:
    """Split this model's attention over the ranks that share a sequence, in training and in eval mode.

    From now on it takes this rank's part of the tokens (`split_for_sequence_parallel`) and returns results for that
    part. An `attention_mask` and `cu_seq_lens_q` are those of the whole rows, on every rank. Position ids are of the
    part; without them every row counts from 0.

    `labels` are of the part and not shifted: the last token of a part predicts the first label of the next. Labels that
    were shifted over the whole sequence are passed as `shift_labels`. The loss of either is the mean over the whole
    sequence, on every rank, and its gradients, averaged over the ranks, are those of one process. With
    `num_items_in_batch` it is the sum over that number. As in transformers the last token of a document in a row
    predicts the next document's first label, unless that label is -100.

    Two cases compute another loss. Where a decoder is dispatched without its head, the head does not know of the ranks
    and takes the mean of its own part: give it no `labels`, compute the loss from the logits. transformers' Trainer
    multiplies the loss by the number of ranks if `average_tokens_across_devices` is true: set it to false.

    Without a mask and `cu_seq_lens_q`, documents begin where position ids start again: also in a model that takes
    positions for its table alone (BERT), where transformers on one process would attend across.

    Args:
        model: a transformers decoder, or a module that contains one (DistributedDataParallel, an adapter).
        group: the ranks that share a sequence; by default those of `init_sequence_parallel`, asked at every call.

    Raises:
        ValueError: there is no transformers model, or it does more than can be split; nothing was changed then.
    """
    target = _find_model(model)
    if dispatch_of(target) is not None:
        raise UserError(f"{type(target).__name__} is dispatched already")
    decoder = target.get_decoder()
    check_supported(target, decoder)
    DispatchedModel(target, decoder, group)


def undispatch_modules(model: nn.Module) -> None:
    """Give a dispatched model its own attention back, after the last backward pass (which may recompute activations).

    Raises:
        ValueError: it is not dispatched.
    """
    target = _find_model(model)
    dispatch = dispatch_of(target)
    if dispatch is None:
        raise UserError(f"{type(target).__name__} is not dispatched")
    dispatch.undo(target)


@contextmanager
def dispatched_modules(model: nn.Module, *, group: ProcessGroup | None = None) -> Iterator[None]:
    """`dispatch_modules` for the length of a block."""
    dispatch_modules(model, group=group)
    try:
        yield
    finally:
        undispatch_modules(model)


def _find_model(module: nn.Module) -> PreTrainedModel:
    """The outermost transformers model in `module`."""
    from transformers import PreTrainedModel

    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            return part
    raise UserError(f"{type(module).__name__} contains no transformers model")
