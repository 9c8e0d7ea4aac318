"""Weights that are split over ranks while they are not used (mode isp), by torch's FSDP2.

Each block's weights are gathered before the block runs, in forward and in backward, and freed after it; its gradients
are reduce-scattered. FSDP2 calls the groups a mesh of `(replicate, shard)`; here it is `(replica, wp)`.
"""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from roll.models.hf_mapping import mapped_parameters


def shard_weights(gpt: GPTModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Split the parameters of `gpt` in place, each along the dimension that the table of weights names.

    Args:
        mesh: `(replica, wp)`.
        dtype: what weights are gathered in; gradients are summed in fp32.
    """
    dims = {mapped.parameter: mapped.dim for mapped in mapped_parameters(gpt, "isp")}

    def placement(parameter: nn.Parameter) -> Shard:
        dim = dims[parameter]
        assert dim is not None
        return Shard(dim)

    # Inputs stay as they are: RoPE's angles would lose their precision.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard = partial(
        fully_shard, mesh=mesh, reshard_after_forward=True, shard_placement_fn=placement, mp_policy=precision
    )
    layers = list(gpt.decoder.layers)
    ends = [getattr(gpt, name) for name in ("embedding", "head", "output_layer") if hasattr(gpt, name)]
    for block in [*layers, *(end for end in ends if any(True for _ in end.parameters()))]:
        shard(block)
    shard(gpt)
    # GPTModel's output is a transposed view, which nobody changes in place; FSDP2 warns of that at every call.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPGPTModel\) returned a view tensor")
    if hasattr(gpt, "head"):
        # The head's weight is used in methods, not in a forward pass.
        for method in ("log_probs", "logits"):
            register_fsdp_forward_method(gpt.head, method)
    for block, following in pairwise(layers):
        block.set_modules_to_forward_prefetch([following])
    for module in gpt.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: our losses are already divided by their global normaliser.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
