"""The norm of a model's gradients, of which every rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gradient_norm(gradients: Iterable[Tensor], groups: Iterable[ProcessGroup], device: torch.device) -> float:
    """The L2 norm over this rank's `gradients` and those of all ranks that are reached through `groups`.

    Collective over each group in turn. A gradient that several of these ranks hold is passed by one of them only.
    """
    squares = [gradient.float().square().sum(dtype=torch.float64) for gradient in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return float(total.sqrt())
