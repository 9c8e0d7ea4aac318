"""The mean over the tokens of a sequence whose parts are on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from roll.parallel.sequence.collectives import Reducer, check_reducer
from roll.parallel.sequence.groups import sequence_group


def reduce_sequence_parallel_loss(
    mean_loss: Tensor,
    num_tokens: Tensor | int,
    *,
    reducer: Reducer = "mean",
    total_tokens: Tensor | int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The token-weighted mean of the ranks' mean losses, on every rank, with the gradients of one process.

    With n_r tokens and the mean loss l_r on rank r the result is L = sum(n_r l_r) / sum(n_r), and L's derivative with
    respect to l_r is n_r / sum(n_r). That is what is propagated back, times the number of ranks of the group if
    gradients are averaged over them afterwards (`reducer="mean"`: DistributedDataParallel, FSDP, DeepSpeed), and as it
    is if they are added up (`"sum"`).

    XTuner's function of this name returns the same value but propagates 1 to every l_r. Its optimizer follows the
    unweighted mean of the ranks' means: with labels on one of n ranks, gradients that are n times too small, under a
    loss that looks right.

    Args:
        mean_loss: scalar, the mean over this rank's tokens; without any it may be NaN and does not count.
        num_tokens: how many tokens that is. Labels are shifted before they are split (`shift_labels`), so this is
            `(labels != -100).sum()` of the rank's own labels. Not changed.
        total_tokens: divide by this instead of the group's tokens: the labels of all micro-batches of a step, if
            gradients accumulate, so that the results add up to the mean of the step.
        group: the ranks that share a mean, by default those that share the sequence. With torch.distributed's
            `group.WORLD` it is one mean over data-parallel ranks too.

    Returns:
        Scalar of the dtype of `mean_loss`; zero, with zero gradients, if no rank has a token.

    Raises:
        ValueError: `mean_loss` or `num_tokens` is not a scalar, or the reducer is unknown.
    """
    check_reducer(reducer)
    if mean_loss.numel() != 1:
        raise ValueError(f"mean_loss must be a scalar, got shape {tuple(mean_loss.shape)}")
    own = torch.as_tensor(num_tokens, device=mean_loss.device).detach().to(torch.float64)
    if own.numel() != 1:
        raise ValueError(f"num_tokens must be one number, got shape {tuple(own.shape)}")
    own = own.reshape(())
    group = sequence_group(group)
    counted = torch.where(own > 0, own * mean_loss.detach().double().reshape(()), 0.0)
    sums = torch.stack((counted, own))
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    total = sums[1] if total_tokens is None else torch.as_tensor(total_tokens, device=own.device).double()
    denominator = total.clamp(min=1)
    ranks = 1 if group is None or reducer == "sum" else group.size()
    reduced: Tensor = _WeightedMean.apply(mean_loss, sums[0] / denominator, ranks * own / denominator)
    return reduced


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
