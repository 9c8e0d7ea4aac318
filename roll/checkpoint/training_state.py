"""The weights and the optimizer's state of a model, each tensor with its place in the whole.

Entries have Hugging Face names and shapes, whatever the mode: a checkpoint of one mode is read by every other.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from roll.models.hf_mapping import MappedParameter, mapped_parameters
from roll.parallel.state import ParallelState

MOMENTS = ("exp_avg", "exp_avg_sq")


def sharded_training_state(
    gpt: GPTModel, optimizer: MegatronOptimizer, state: ParallelState
) -> tuple[dict[str, ShardedTensor], Tensor]:
    """This rank's part of every weight and moment, as views to save from or to load into; and Adam's step count.

    Weights are in the precision that the optimizer updates.
    """
    sharded = {}
    for mapped in mapped_parameters(gpt, state.mode):
        updated, adam = _updated(mapped), _adam_state(mapped, optimizer)
        for kind, whole in (("weight", updated.data), *((moment, adam[moment]) for moment in MOMENTS)):
            for name, part in zip(mapped.hf_names, whole.chunk(len(mapped.hf_names)), strict=True):
                key = f"{kind}/{name}"
                sharded[key] = _placed(key, part, mapped.dim, state)
    return sharded, _step_count(gpt, optimizer, state)


def restore_training_state(
    gpt: GPTModel, optimizer: MegatronOptimizer, state: ParallelState, loaded: dict[str, Tensor], step: Tensor
) -> None:
    """Copy what was loaded for `sharded_training_state` into the model and its optimizer."""
    sharded, _ = sharded_training_state(gpt, optimizer, state)
    with torch.no_grad():
        for key, place in sharded.items():
            place.data.copy_(loaded[key])
        for mapped in mapped_parameters(gpt, state.mode):
            adam = _adam_state(mapped, optimizer)
            if "step" in adam:
                adam["step"].copy_(step)
            updated = _updated(mapped)
            if updated.dtype != mapped.parameter.dtype:  # The model runs on a copy in lower precision.
                mapped.parameter.data.copy_(updated)
    for group in optimizer.param_groups:
        if "step" in group:  # transformer-engine's and Apex' Adam count per group.
            group["step"] = int(step)


def _updated(mapped: MappedParameter) -> Tensor:
    """What the optimizer updates in the parameter's place: an fp32 copy, a local shard, or the parameter itself."""
    updated: Tensor = getattr(mapped.parameter, "main_param", mapped.parameter)
    return updated


def _adam_state(mapped: MappedParameter, optimizer: MegatronOptimizer) -> dict[str, Any]:
    """The optimizer's state of one parameter; before the first step what that step would start from."""
    updated = _updated(mapped)
    adam: dict[str, Any] = optimizer.state[updated]
    for moment in MOMENTS:
        if moment not in adam:
            adam[moment] = torch.zeros_like(updated)
    if "step" not in adam and not _counts_per_group(optimizer):
        adam["step"] = torch.zeros(())
    return adam


def _counts_per_group(optimizer: MegatronOptimizer) -> bool:
    return not isinstance(optimizer.optimizer, torch.optim.Optimizer) or "step" in optimizer.param_groups[0]


def _step_count(gpt: GPTModel, optimizer: MegatronOptimizer, state: ParallelState) -> Tensor:
    if _counts_per_group(optimizer):
        return torch.tensor(float(optimizer.param_groups[0].get("step", 0)))
    first = next(mapped_parameters(gpt, state.mode))
    step: Tensor = _adam_state(first, optimizer)["step"]
    return step.clone()


def _placed(key: str, part: Tensor, dim: int | None, state: ParallelState) -> ShardedTensor:
    index, count = state.weights.rank(), state.weights.size()
    offsets = [] if dim is None else [(dim, index, count)]
    copy = state.weight_replica if dim is not None else state.weight_replica * count + index
    return ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=copy)
