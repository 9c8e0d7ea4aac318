"""The mean over the tokens of a sequence whose parts are on several ranks."""

from __future__ import annotations

from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from roll.parallel.sequence.agreement import agree
from roll.parallel.sequence.call_forms import check_group, check_number, or_later_form
from roll.parallel.sequence.collectives import Reducer
from roll.parallel.sequence.groups import sequence_group
from roll.platform import get_platform


def _reduce_as_later(
    mean_loss: Tensor, loss_scale: Tensor | float, sp_group: ProcessGroup | None = None, **settings: Any
) -> Tensor:
    """The same under the names of XTuner v0.1.19 to v0.2.0."""
    return reduce_sequence_parallel_loss(mean_loss, loss_scale, group=sp_group, **settings)


@overload
def reduce_sequence_parallel_loss(
    mean_loss: Tensor,
    num_tokens: Tensor | float,
    *,
    reducer: Reducer = "mean",
    total_tokens: Tensor | float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor: ...
@overload
def reduce_sequence_parallel_loss(
    mean_loss: Tensor,
    loss_scale: Tensor | float,
    sp_group: ProcessGroup | None = None,
    *,
    reducer: Reducer = "mean",
    total_tokens: Tensor | float | None = None,
) -> Tensor: ...
@or_later_form(_reduce_as_later, lambda given: len(given) > 2)
def reduce_sequence_parallel_loss(
    mean_loss: Tensor,
    num_tokens: Tensor | float,
    *,
    reducer: Reducer = "mean",
    total_tokens: Tensor | float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The token-weighted mean of the ranks' mean losses, on every rank, with the gradients of one process.

    With n_r tokens and the mean loss l_r on rank r the result is L = sum(n_r l_r) / sum(n_r), and L's derivative with
    respect to l_r is n_r / sum(n_r). That is what is propagated back, times the number of ranks of the group if
    gradients are averaged over them afterwards (`reducer="mean"`: DistributedDataParallel, FSDP, DeepSpeed), and as it
    is if they are added up (`"sum"`).

    The loss of a dispatched model is the mean of the whole sequence already, on every rank. Its weighted mean is the
    same under any counts, and so are the gradients: `(labels != -100).sum()` of this rank's labels is a right count,
    shifted or not, among the ranks of one sequence.

    XTuner's function of this name returns the same value but propagates 1 to every l_r. Its optimizer follows the
    unweighted mean of the ranks' means: with labels on one of n ranks, gradients that are n times too small, under a
    loss that looks right.

    XTuner v0.1.19 to v0.2.0 call it with (mean_loss, loss_scale, sp_group=None), and so it can be called here.

    Args:
        mean_loss: scalar, the loss of a dispatched model or the mean over this rank's tokens. Without any token its
            value may be NaN and does not count, but zero is still propagated back through it, and through a division of
            0 by 0 zero becomes NaN: a mean that is written by hand divides by `count.clamp(min=1)`.
        num_tokens: how many tokens that is, or another weight. Not changed. A mean of this rank's own is over labels
            that were shifted before the split (`shift_labels`), and this is `(labels != -100).sum()` of them.
        total_tokens: divide by this instead of the group's tokens: the shifted labels of all micro-batches of a step,
            if gradients accumulate, so that the results add up to the mean of the step. With labels that were not
            shifted before, give the model `num_items_in_batch` instead.
        group: the ranks that share a mean, by default those that share the sequence. With torch.distributed's
            `group.WORLD` it is one mean over data-parallel ranks too. Counts of different sequences must then be those
            of their targets, which the first label of a row is not: `(labels[:, 1:] != -100).sum()` of the whole rows
            on one rank of each sequence, 0 on its others.

    Returns:
        Scalar of the dtype of `mean_loss`; zero, with zero gradients, if no rank has a token.

    Raises:
        ValueError: on every rank, if on one of them a loss or a number of tokens is not a scalar or the reducer is
            unknown, or if they do not have the same reducer and total_tokens. On this rank alone, if `group` is none.
    """
    check_group(group)
    check_group(group)
    group = sequence_group(group)
    problem = _problem(mean_loss, num_tokens, total_tokens, reducer)
    if problem is None:
        device = mean_loss.device
        own = torch.as_tensor(num_tokens, device=device).detach().double().reshape(())
        counted = torch.where(own > 0, own * mean_loss.detach().double().reshape(()), 0.0)
        total = None if total_tokens is None else torch.as_tensor(total_tokens, device=device).detach().double()
        total = None if total is None else total.reshape(())
    else:
        device = mean_loss.device if isinstance(mean_loss, Tensor) else _device_of(group)
        own, counted, total = torch.zeros(3, dtype=torch.float64, device=device).unbind()
    everyone = _exchange(counted, own, total, problem, reducer, group)
    sums = everyone.sum(0)
    denominator = sums[1] if total is None else total
    denominator = torch.where(denominator > 0, denominator, 1.0)
    ranks = 1 if group is None or reducer == "sum" else group.size()
    reduced: Tensor = _WeightedMean.apply(mean_loss, sums[0] / denominator, ranks * own / denominator)
    return reduced


def _device_of(group: ProcessGroup | None) -> torch.device:
    """Device on which the group's collectives take tensors."""
    on_cpu = group is None or dist.get_backend(group) == "gloo"
    return torch.device("cpu") if on_cpu else get_platform().device()


def _problem(mean_loss: object, num_tokens: object, total_tokens: object, reducer: str) -> str | None:
    """Reason why this rank cannot go on."""
    if reducer not in ("mean", "sum"):
        return f"reducer must be mean or sum, got {reducer!r}"
    if not isinstance(mean_loss, Tensor):
        return f"mean_loss must be a tensor, got {type(mean_loss).__name__}"
    if mean_loss.numel() != 1:
        return f"mean_loss must be a scalar, got shape {tuple(mean_loss.shape)}"
    numbers = {"num_tokens": num_tokens} | ({} if total_tokens is None else {"total_tokens": total_tokens})
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            if number.numel() != 1:
                return f"{name} must be one number, got shape {tuple(number.shape)}"
            continue
        try:
            check_number(name, number)
        except ValueError as refused:
            return str(refused)
    return None


def _exchange(
    counted: Tensor, own: Tensor, total: Tensor | None, problem: str | None, reducer: str, group: ProcessGroup | None
) -> Tensor:
    """`[ranks, 2]`: the summed loss and the tokens of every rank.

    Whether all can go on, and with the same settings, travels along. Only if not is there a second exchange, in words.
    """
    if group is None or group.size() == 1:
        agree(None, problem)
        return torch.stack((counted, own)).unsqueeze(0)
    settings = torch.tensor([problem is not None, reducer == "mean"], dtype=torch.float64, device=own.device)
    divisor = own.new_tensor([-1.0]) if total is None else total.reshape(1)
    row = torch.cat((torch.stack((counted, own)), settings, divisor))
    everyone = row.new_empty(group.size(), len(row))
    dist.all_gather(list(everyone.unbind(0)), row, group=group)
    if everyone[:, 2].any() or (everyone[:, 3:] != everyone[0, 3:]).any():
        agree(group, problem, reducer=reducer, total_tokens=None if total is None else float(total))
    return everyone[:, :2]


class _WeightedMean(torch.autograd.Function):
    """A value that is known, with the weight of this rank's mean loss in it."""

    @staticmethod
    def forward(ctx: Any, mean_loss: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape = mean_loss.shape
        return value.to(mean_loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return (gradient * weight.to(gradient.dtype)).reshape(ctx.shape), None, None
