"""InternLM2's tensors: Megatron-Core's names and shards, and Hugging Face's names and whole tensors.

The table reads in both directions: importing takes this rank's part of every Hugging Face tensor, exporting gathers
the parts again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from roll.config import Mode
from roll.parallel.state import ParallelState


@dataclass(frozen=True)
class WeightRule:
    """One Megatron-Core parameter and the Hugging Face tensors it is made of.

    `{n}` stands for the layer's number in the whole model. Several names are shards of several tensors, one after the
    other: Megatron-Core's `linear_fc1` of a rank is its part of w1 above its part of w3.
    """

    megatron: str
    hf: tuple[str, ...]
    dim: int | None
    """The dimension that tensor parallelism splits; None where every rank has the whole."""
    weight_parallel_dim: int = 0
    """The dimension that weight parallelism (mode isp) splits."""


RULES: tuple[WeightRule, ...] = (
    WeightRule("embedding.weight", ("model.tok_embeddings.weight",), 1, weight_parallel_dim=1),
    WeightRule("decoder.layers.{n}.input_layernorm.weight", ("model.layers.{n}.attention_norm.weight",), None),
    WeightRule("decoder.layers.{n}.self_attention.linear_qkv.weight", ("model.layers.{n}.attention.wqkv.weight",), 0),
    WeightRule("decoder.layers.{n}.self_attention.linear_qkv.bias", ("model.layers.{n}.attention.wqkv.bias",), 0),
    WeightRule(
        "decoder.layers.{n}.self_attention.q_layernorm.weight", ("model.layers.{n}.attention.q_norm.weight",), None
    ),
    WeightRule(
        "decoder.layers.{n}.self_attention.k_layernorm.weight", ("model.layers.{n}.attention.k_norm.weight",), None
    ),
    WeightRule("decoder.layers.{n}.self_attention.linear_proj.weight", ("model.layers.{n}.attention.wo.weight",), 1),
    # Whole on every tensor-parallel rank, which adds it once, after the sum over the ranks.
    WeightRule("decoder.layers.{n}.self_attention.linear_proj.bias", ("model.layers.{n}.attention.wo.bias",), None),
    WeightRule("decoder.layers.{n}.pre_mlp_layernorm.weight", ("model.layers.{n}.ffn_norm.weight",), None),
    WeightRule(
        "decoder.layers.{n}.mlp.linear_fc1.weight",
        ("model.layers.{n}.feed_forward.w1.weight", "model.layers.{n}.feed_forward.w3.weight"),
        0,
    ),
    WeightRule("decoder.layers.{n}.mlp.linear_fc1.w1", ("model.layers.{n}.feed_forward.w1.weight",), 0),
    WeightRule("decoder.layers.{n}.mlp.linear_fc1.w3", ("model.layers.{n}.feed_forward.w3.weight",), 0),
    WeightRule("decoder.layers.{n}.mlp.linear_fc2.weight", ("model.layers.{n}.feed_forward.w2.weight",), 1),
    WeightRule("decoder.final_layernorm.weight", ("model.norm.weight",), None),
    WeightRule("head.weight", ("output.weight",), 0),
    WeightRule("output_layer.weight", ("v_head.weight",), None, weight_parallel_dim=1),
)

_BY_NAME = {rule.megatron: rule for rule in RULES}


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of this rank with the rule that describes it, its layer number filled in."""

    parameter: nn.Parameter
    hf_names: tuple[str, ...]
    dim: int | None
    """The dimension of the Hugging Face tensors that is split over `ParallelState.weights`."""

    def parts(self, of: str = "data") -> tuple[Tensor, ...]:
        """This rank's shard of each Hugging Face tensor, as views of the parameter (or of another attribute of it)."""
        tensor = getattr(self.parameter, of)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.chunk(len(self.hf_names))


def mapped_parameters(model: GPTModel, mode: Mode) -> Iterator[MappedParameter]:
    """Every parameter of this rank's part of the model, in the model's order."""
    for name, parameter in model.named_parameters():
        number = ""
        local = re.match(r"decoder\.layers\.(\d+)\.", name)
        if local:
            number = str(model.decoder.layers[int(local.group(1))].layer_number - 1)
            name = re.sub(r"\.layers\.\d+\.", ".layers.{n}.", name)
        rule = _BY_NAME[name]
        dim = rule.weight_parallel_dim if mode == "isp" else rule.dim
        yield MappedParameter(parameter, tuple(hf.format(n=number) for hf in rule.hf), dim)


def export_hf_tensors(
    model: GPTModel, state: ParallelState, *, of: str = "data", dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of this pipeline stage, one at a time: weights, or with `of` gradients.

    With `dtype` in that type: weights that are split while they are not used may be stored in a wider one.

    Collective over the ranks that share the weights: they iterate together, and each gets every tensor. A tensor that
    is not split is the parameter itself, so a caller that keeps it clones it.
    """
    for mapped in mapped_parameters(model, state.mode):
        for name, part in zip(mapped.hf_names, mapped.parts(of), strict=True):
            part = part if dtype is None else part.to(dtype)  # before it is gathered: less to send
            yield name, part if mapped.dim is None else _gather(part, mapped.dim, state.weights)


def _gather(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)
