"""The loss of a dispatched model: the mean over the whole sequence, the same on every rank.

Labels are shifted across the ranks: the last token of a part predicts the first label of the next rank's part.
Everything else is transformers' own loss function, asked for a sum.

    value      L = (S_1 + ... + S_n) / T, with S_r summed over the targets of rank r's tokens and T all targets
    gradient   of S_r: (g_1 + ... + g_n) / T, where rank r propagates g_r into its L

This is the derivative of g_1 L + ... + g_n L. So the gradients of the weights are those of one process wherever the g
add up to what the combination of gradients divides by:

    L.backward(), averaged over ranks                       g_r = 1                   their sum is n
    reduce_sequence_parallel_loss, counts c_r, averaged     g_r = n c_r / sum(c)      their sum is n
    reduce_sequence_parallel_loss, counts c_r, added up     g_r = c_r / sum(c)        their sum is 1

Within one sequence, counts need not be those of the targets: `(labels != -100).sum()` of a part counts a label on the
rank that has it, not on the rank whose token predicts it, and counts the first label of a row, which nothing predicts.

Without any target L and its gradients are zero, where transformers has 0 / 0.

Legend: b rows, n ranks, s tokens of a row on a rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from roll.errors import UserError
from roll.parallel.sequence.agreement import agree
from roll.parallel.sequence.collectives import gather_for_own_use
from roll.parallel.sequence.padding import IGNORED_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SETTER = "_loss_function"
"""Attribute in which transformers keeps a loss function that was set; without it, the one of the model's type."""


class ModelLoss:
    """Loss function of one dispatched model, in place for the length of a forward pass with labels."""

    def __init__(self) -> None:
        self.original: Callable[..., Tensor] | None = None
        self.had_own = False
        self.group: ProcessGroup | None = None
        self.are_shifted = False
        self.items: float | None = None
        self.calls = 0

    def begin(
        self, model: PreTrainedModel, kwargs: dict[str, Any], group: ProcessGroup | None
    ) -> tuple[str | None, dict[str, object]]:
        """Take labels and their number out of the model's arguments, which are changed, and replace its loss function.

        Returns:
            The problem of this rank, if there is one, and what must be the same on all ranks.
        """
        self.end(model)
        labels, shifted = kwargs.get("labels"), kwargs.pop("shift_labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        if labels is None and shifted is None:
            return None, {"labels": None, "num_items_in_batch": None}
        problem = _problem(model, kwargs, labels, shifted, items)
        if problem is not None:
            return problem, {}
        self.group, self.are_shifted, self.calls = group, shifted is not None, 0
        self.items = None if items is None else float(items)
        kwargs["labels"] = shifted if self.are_shifted else labels
        self.original, self.had_own = model.loss_function, SETTER in model.__dict__
        model.__dict__[SETTER] = self.compute
        return None, {"labels": "shift_labels" if self.are_shifted else "labels", "num_items_in_batch": self.items}

    def end(self, model: PreTrainedModel) -> None:
        """Give the model its loss function back, if it was replaced."""
        if self.original is None:
            return
        if self.had_own:
            model.__dict__[SETTER] = self.original
        else:
            del model.__dict__[SETTER]
        self.original = None

    def check(self, model: PreTrainedModel) -> None:
        """Raise ValueError if labels were given and the model did not compute its loss with its loss function."""
        if self.original is not None and self.calls != 1:
            raise UserError(
                f"{type(model).__name__} called its loss function {self.calls} times for its labels: what its loss is "
                "made of is not known; compute it from the logits"
            )

    def compute(self, logits: Tensor, labels: Tensor, vocab_size: int, **others: Any) -> Tensor:
        """Loss of logits `[b, s, vocabulary]` and labels `[b, s]`, as a model calls transformers' loss function."""
        assert self.original is not None
        self.calls += 1
        labels = labels.to(logits.device)  # where the ranks exchange them
        targets = labels if self.are_shifted else shift_over_ranks(labels, self.group)
        others |= {"shift_labels": targets, "num_items_in_batch": 1}
        summed, problem = logits.new_zeros(()), _outside(targets, logits.shape[-1])
        if problem is None:
            try:
                summed = self.original(logits=logits, labels=targets, vocab_size=vocab_size, **others)
            except Exception as error:  # noqa: BLE001 - a user's loss function may raise anything, and the others wait
                problem = f"the loss function raised {type(error).__name__}: {error}"
        count = (targets != IGNORED_LABEL).sum()
        return mean_over_ranks(summed, count, self.items, self.group, problem)


def shift_over_ranks(labels: Tensor, group: ProcessGroup | None) -> Tensor:
    """Labels `[b, s]` of this rank's part at the position that predicts them, ignored at the end of the last part."""
    first, after = labels[:, :1].long(), 1
    if group is not None and group.size() > 1:
        first, after = gather_for_own_use(first, 1, group), group.rank() + 1
    next_first = F.pad(first, (0, 1), value=IGNORED_LABEL)[:, after : after + 1]
    return torch.cat((labels[:, 1:].long(), next_first), dim=1)


def mean_over_ranks(
    summed: Tensor, count: Tensor, items: float | None, group: ProcessGroup | None, problem: str | None = None
) -> Tensor:
    """The sum of all ranks over their counts, or over `items`; scalars. Zero if all counts are.

    Raises ValueError on every rank if one of them has a problem.
    """
    own = torch.stack((summed.detach().double(), count.double(), torch.full_like(count, problem is not None).double()))
    total = own if group is None or group.size() == 1 else gather_for_own_use(own.unsqueeze(0), 0, group).sum(0)
    if total[2] > 0:
        agree(group, problem)
    divisor = total[1].clamp(min=1) if items is None else torch.full_like(total[1], items)
    mean: Tensor = _MeanOverRanks.apply(summed, total[0] / divisor, divisor, group)
    return mean


class _MeanOverRanks(torch.autograd.Function):
    """A mean that is known, of this rank's sum among others."""

    @staticmethod
    def forward(ctx: Any, summed: Tensor, mean: Tensor, divisor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(divisor)
        ctx.group = group
        return mean.to(summed.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (divisor,) = ctx.saved_tensors
        total = gradient.double()
        if ctx.group is not None and ctx.group.size() > 1:
            total = gather_for_own_use(total.unsqueeze(0), 0, ctx.group).sum()
        return (total / divisor).to(gradient.dtype), None, None, None


def _problem(model: PreTrainedModel, kwargs: dict[str, Any], labels: Any, shifted: Any, items: Any) -> str | None:
    """Reason why this rank cannot compute a loss."""
    if labels is not None and shifted is not None:
        return "the model takes labels or shift_labels, not both: labels are shifted by the model, shift_labels are not"
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    given, name = (labels, "labels") if shifted is None else (shifted, "shift_labels")
    if isinstance(tokens, Tensor):  # else it is a problem of its own
        expected = tuple(tokens.shape[:2])
        is_integer = isinstance(given, Tensor) and not (given.is_floating_point() or given.is_complex())
        if not is_integer or tuple(given.shape) != expected:
            found = f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
            return f"{name} must be those of this rank's part, {expected} integers, got {found}"
    if items is not None and not (_is_scalar(items) and float(items) > 0):
        return f"num_items_in_batch must be one positive number, got {items!r}"
    parameters = inspect.signature(model.loss_function).parameters
    missing = [each for each in ("shift_labels", "num_items_in_batch") if each not in parameters]
    if missing:
        name = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        return (
            f"the loss function {name} takes no {' and no '.join(missing)}, so that its parts cannot be added up: "
            "compute the loss from the logits"
        )
    ignored = parameters["ignore_index"].default if "ignore_index" in parameters else IGNORED_LABEL
    if ignored != IGNORED_LABEL:
        return f"the loss function ignores labels of {ignored}, not of {IGNORED_LABEL}"
    return None


def _outside(targets: Tensor, vocab_size: int) -> str | None:
    """The first label that the vocabulary does not have, in words."""
    wrong = targets[(targets != IGNORED_LABEL) & ((targets < 0) | (targets >= vocab_size))]
    return f"labels: {int(wrong[0])} is outside the vocabulary of {vocab_size}" if len(wrong) else None


def _is_scalar(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
