"""Moving a tensor whose sequence is split over the ranks of a group, forward and backward.

Where every rank of the group goes on to compute the same thing, a gradient exists once per rank, and what is right
depends on how the gradients of the weights are combined afterwards. That is the argument `reducer`: `mean` if they are
averaged over the ranks (DistributedDataParallel, FSDP, DeepSpeed), `sum` if they are added up. Under `mean` everything
between two exchanges carries the gradient n times, so that the average over n parts is their sum; it is the place
where the parts meet (`gather_tensor`, `reduce_sequence_parallel_loss`) that puts the factor in.

Legend: n ranks of the group. None for a group is the one of this process, and one rank before it exists.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from roll.errors import UserError
from roll.parallel.sequence.agreement import agree
from roll.parallel.sequence.groups import sequence_group

Reducer = Literal["mean", "sum"]


def check_reducer(reducer: str) -> None:
    """Raise ValueError if it is neither `mean` nor `sum`."""
    if reducer not in ("mean", "sum"):
        raise UserError(f"reducer must be mean or sum, got {reducer!r}")


def all_to_all(
    x: Tensor, scatter_dim: int = 2, gather_dim: int = 1, group: ProcessGroup | None = None, *, check: bool = True
) -> Tensor:
    """Split `scatter_dim` over the ranks and join `gather_dim` from them, in the order of the ranks.

    `[b, s/n, h, d]` becomes `[b, s, h/n, d]`, and with the two dims exchanged it is the way back. Its backward is the
    way back too: every element has one place, so this needs no reducer.

    Args:
        check: compare the shapes and dtypes of all ranks first, at the price of a small exchange; False where they
            are known.

    Raises:
        ValueError: n does not divide `scatter_dim`, the dims are the same, or shapes or dtypes differ between ranks.
    """
    group = sequence_group(group)
    if group is None or group.size() == 1:
        return x
    scatter_dim, gather_dim = scatter_dim % x.ndim, gather_dim % x.ndim
    if check:
        problem = None
        if scatter_dim == gather_dim:
            problem = f"all_to_all scatters and gathers the same dim {scatter_dim}"
        elif x.shape[scatter_dim] % group.size():
            problem = f"dim {scatter_dim} of {tuple(x.shape)} does not divide by the {group.size()} ranks of the group"
        agree(group, problem, shape=tuple(x.shape), dtype=x.dtype, dims=(scatter_dim, gather_dim))
    by_receiver = x.unflatten(scatter_dim, (group.size(), -1)).movedim(scatter_dim, 0)
    by_sender = _AllToAll.apply(by_receiver, group)
    return by_sender.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def gather_tensor(x: Tensor, dim: int = 1, group: ProcessGroup | None = None, *, reducer: Reducer = "mean") -> Tensor:
    """The whole of a tensor whose parts are on the ranks, for all of them to compute the same from it.

    Backward: every rank has the whole gradient and keeps its own part, under `mean` n times. The way there,
    `split_tensor`, has torch's own backward under both: zero outside the rank's part, which the reducer completes.

    Raises:
        ValueError: shapes or dtypes differ between ranks.
    """
    check_reducer(reducer)
    group = sequence_group(group)
    if group is None or group.size() == 1:
        return x
    agree(group, None, shape=tuple(x.shape), dtype=x.dtype)
    parts = _Gather.apply(x, group, float(group.size()) if reducer == "mean" else 1.0)
    return _join(parts, dim % x.ndim)


def gather_for_own_use(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The same where every rank computes something else from the whole: backward adds up the gradients of all ranks.

    Shapes are equal on all ranks; no reducer enters.
    """
    return _join(_GatherForOwnUse.apply(x, group), dim % x.ndim)


def _join(parts: Tensor, dim: int) -> Tensor:
    """`[n, ...]` to the parts one after another along `dim`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _exchange(by_receiver: Tensor, group: ProcessGroup) -> Tensor:
    """`[n, ...]` in the order of receivers to `[n, ...]` in the order of senders."""
    by_receiver = by_receiver.contiguous()
    by_sender = torch.empty_like(by_receiver)
    dist.all_to_all_single(by_sender, by_receiver, group=group)
    return by_sender


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[...]` to `[n, ...]`."""
    parts = x.new_empty((group.size(), *x.shape))
    dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=group)
    return parts


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, by_receiver: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(by_receiver, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, scale: float) -> Tensor:
        ctx.group, ctx.scale = group, scale
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.group.rank()] * ctx.scale, None, None


class _GatherForOwnUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A reduce-scatter that every backend has, with a sum in the order of the ranks.
        return _exchange(gradient, ctx.group).sum(0), None
