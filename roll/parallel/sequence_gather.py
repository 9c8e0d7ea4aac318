"""The parts of a sequence that the ranks of a group hold, gathered."""

from __future__ import annotations

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_sequence(x: Tensor, group: ProcessGroup, *, sums_gradients: bool = False) -> Tensor:
    """`[b, s/n, ...]` to `[b, s, ...]`, the parts in the order of the ranks.

    In backward each rank takes its own part of the gradient: as it is where all ranks do the same with the whole,
    summed over the ranks where each does something else.
    """
    if group.size() == 1:
        return x
    whole = gather_from_sequence_parallel_region(
        x.transpose(0, 1).contiguous(), tensor_parallel_output_grad=sums_gradients, group=group
    )
    return whole.transpose(0, 1)
