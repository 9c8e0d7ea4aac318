"""Megatron-Core's parameters of this rank, and Hugging Face's whole tensors under canonical names.

The table of `weight_rules` reads in both directions: importing takes this rank's part of every Hugging Face tensor,
exporting gathers the parts again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.config import Mode
from roll.models.weight_rules import RULES, Split
from roll.parallel.state import ParallelState


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of this rank with the rule that describes it, its layer number filled in."""

    parameter: nn.Parameter
    hf_names: tuple[str, ...]
    split: Split | None
    """Split of the Hugging Face tensors; None where every rank has the whole."""
    trained: bool
    """Whether training changes it."""

    @property
    def dim(self) -> int | None:
        """The dimension that is split; None where every rank has the whole."""
        return None if self.split is None else self.split.dim

    def place(self, state: ParallelState) -> tuple[int, int]:
        """This rank's part of each Hugging Face tensor, as (index, count) of equal parts along `dim`."""
        if self.split is None:
            return 0, 1
        group = state.split_group(self.split.over)
        return group.rank(), group.size()

    def parts(self, of: str = "data") -> tuple[Tensor, ...]:
        """This rank's shard of each Hugging Face tensor, as views of the parameter (or of another attribute of it)."""
        return self.local(of).chunk(len(self.hf_names))

    def local(self, of: str = "data") -> Tensor:
        """This rank's part of the parameter (or of another attribute of it)."""
        tensor = getattr(self.parameter, of)
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mapped_parameters(model: GPTModel, mode: Mode) -> Iterator[MappedParameter]:
    """Every parameter of this rank's part of the model, in the model's order."""
    for name, parameter in model.named_parameters():
        number = ""
        local = re.match(r"decoder\.layers\.(\d+)\.", name)
        if local:
            number = str(model.decoder.layers[int(local.group(1))].layer_number - 1)
            name = re.sub(r"\.layers\.\d+\.", ".layers.{n}.", name)
        rule = RULES[name]
        names = tuple(hf.replace("{n}", number) for hf in rule.hf)
        yield MappedParameter(parameter, names, rule.split_in(mode), rule.trained)


def export_hf_tensors(
    model: GPTModel, state: ParallelState, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of the weights of this pipeline stage, one at a time.

    With `dtype` in that type: weights that are split while they are not used may be stored in a wider one.

    Collective over the ranks that share the weights: they iterate together, and each gets every tensor. A tensor that
    is not split is the parameter itself, so a caller that keeps it clones it.
    """
    for mapped in mapped_parameters(model, state.mode):
        yield from _whole(mapped, "data", dtype, state)


def export_hf_gradients(model: GPTModel, state: ParallelState) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole fp32 gradient) of the weights that are trained; otherwise as `export_hf_tensors`."""
    for mapped in mapped_parameters(model, state.mode):
        if mapped.trained:
            yield from _whole(mapped, "main_grad", None, state)


def _whole(
    mapped: MappedParameter, of: str, dtype: torch.dtype | None, state: ParallelState
) -> Iterator[tuple[str, Tensor]]:
    for name, part in zip(mapped.hf_names, mapped.parts(of), strict=True):
        part = part if dtype is None else part.to(dtype)  # before it is gathered: less to send
        yield name, part if mapped.split is None else _gather(part, mapped.split, state)


def _gather(part: Tensor, split: Split, state: ParallelState) -> Tensor:
    group = state.split_group(split.over)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=split.dim)
