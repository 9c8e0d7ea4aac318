"""The linear layers in which the parallel modes differ from Megatron-Core's own."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear


class GatherOnceColumnParallelLinear(ColumnParallelLinear):
    """The column-parallel linear of mode msp: it keeps the gathered input for its backward pass.

    Megatron-Core's own keeps only this rank's shard and gathers again in backward (mode fsp): less memory, one more
    collective.
    """

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """`[s/tp, b, in]` to `[s, b, out/tp]`; the gradient of the input is reduce-scattered."""
        whole = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        return linear(whole, self.weight, self.bias), None


class GateAndUpLinear(nn.Module):
    """w1 and w3 of the MLP as two parameters, for weights that are split when they are not used (mode isp).

    Megatron-Core's `linear_fc1` is w1 above w3 in one parameter. Its shards would be whole rows of one of the two, not
    a part of each, which is what every other mode and the Hugging Face layout mean by a part.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: object) -> None:
        super().__init__()
        shape = output_size // 2, input_size
        self.w1 = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.w3 = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """`[s, b, H]` to `[s, b, 2 * ffn]`: the gate, then what it gates."""
        return torch.cat((linear(input_, self.w1), linear(input_, self.w3)), dim=-1), None
