"""Statistics over the responses to one prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.masking import check_same_shape


@torch.no_grad()
def group_moments(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """For each response the mean and the standard deviation of the scores of its group.

    The deviation is the sample's, divided by n - 1, and 0 for a group of one. Moments are taken in fp64.

    Example: scores [1, 3, 5] of groups [0, 0, 7]: means [2, 2, 5], deviations [sqrt(2), sqrt(2), 0].

    Args:
        scores: `[B]` floating point.
        group: `[B]` int64, equal for the responses to one prompt; in any order.

    Returns:
        `[B]` each, fp64.

    Raises:
        ValueError: unequal shapes.
    """
    check_same_shape(scores=scores, group=group)
    _, place, count = group.unique(return_inverse=True, return_counts=True)
    exact = scores.double()

    def of_group(values: Tensor) -> Tensor:
        return values.new_zeros(len(count)).index_add_(0, place, values)

    mean = (of_group(exact) / count)[place]
    variance = of_group((exact - mean).square()) / (count - 1).clamp(min=1)
    return mean, variance.sqrt()[place]
