"""The linear layers in which the parallel modes differ from Megatron-Core's own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear, silu


class GatherOnceColumnParallelLinear(ColumnParallelLinear):
    """The column-parallel linear of mode msp: it keeps the gathered input for its backward pass.

    Megatron-Core's own keeps only this rank's shard and gathers again in backward (mode fsp): less memory, one more
    collective.
    """

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """`[s/tp, b, in]` to `[s, b, out/tp]`; the gradient of the input is reduce-scattered."""
        whole = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        return linear(whole, self.weight, self.bias), None


class BiasedRowParallelLinear(RowParallelLinear):
    """wo with a bias. Megatron-Core's setting for it, `add_bias_linear`, is one for wo and for the MLP.

    Each rank has the whole bias and adds it after the sum over the ranks, to its own tokens.
    """

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class SwiGLU(nn.Module):
    """silu(w1 x) * w3 x, of both one after the other in one tensor, which is how Megatron-Core computes them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gated = Gated()

    def forward(self, both: Tensor) -> Tensor:
        """`[s, b, 2 * ffn]` to `[s, b, ffn]`."""
        gate, up = both.chunk(2, dim=-1)
        gated: Tensor = self.gated(gate, up)
        return gated


class Gated(nn.Module):
    """silu(gate) * up."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two tensors of equal shapes to one."""
        return silu(gate) * up


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
