"""The weights and the optimizer's state of a model, each tensor with its place in the whole.

Entries have Hugging Face names and shapes, whatever the mode: a checkpoint of one mode is read by every other.
"""

from __future__ import annotations

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
) -> tuple[dict[str, ShardedTensor], int]:
    """This rank's part of every weight and moment, as views to save from or to load into; and Adam's step count.

    Weights are in the precision that the optimizer updates.
    """
    adam = _adam(optimizer)
    sharded: dict[str, ShardedTensor] = {}
    steps = 0
    for mapped in mapped_parameters(gpt, state.mode):
        updated = _updated(mapped)
        moments = _moments(adam, updated)
        steps = _steps(adam, updated)
        for kind, whole in {"weight": updated.data, **moments}.items():
            for name, part in zip(mapped.hf_names, whole.chunk(len(mapped.hf_names)), strict=True):
                sharded[f"{kind}/{name}"] = _placed(f"{kind}/{name}", part, mapped.dim, state)
    return sharded, steps


def restore_training_state(
    gpt: GPTModel, optimizer: MegatronOptimizer, state: ParallelState, loaded: dict[str, Tensor], steps: int
) -> None:
    """Copy what was loaded for `sharded_training_state` into the model and its optimizer."""
    sharded, _ = sharded_training_state(gpt, optimizer, state)
    adam = _adam(optimizer)
    with torch.no_grad():
        for key, place in sharded.items():
            place.data.copy_(loaded[key])
        for mapped in mapped_parameters(gpt, state.mode):
            updated = _updated(mapped)
            if updated.dtype != mapped.parameter.dtype:  # The model runs on a copy in lower precision.
                mapped.parameter.data.copy_(updated)
            if _counts_per_parameter(adam):
                adam.state[updated]["step"].fill_(steps)
    if not _counts_per_parameter(adam):
        for group in adam.param_groups:
            group["step"] = steps


def _adam(optimizer: MegatronOptimizer) -> torch.optim.Optimizer:
    """The optimizer inside Megatron-Core's, which chains one for dense layers and one for experts (we have none)."""
    (only,) = getattr(optimizer, "chained_optimizers", [optimizer])
    adam: torch.optim.Optimizer = only.optimizer
    return adam


def _updated(mapped: MappedParameter) -> Tensor:
    """Tensor that the optimizer updates for the parameter: an fp32 copy, a local shard, or the parameter itself."""
    updated: Tensor = getattr(mapped.parameter, "main_param", mapped.parameter)
    return updated


def _moments(adam: torch.optim.Optimizer, updated: Tensor) -> dict[str, Tensor]:
    """The two moments of one parameter; before the first step what that step would start from."""
    own = adam.state[updated]
    for moment in MOMENTS:
        if moment not in own:
            own[moment] = torch.zeros_like(updated)
    if "step" not in own and _counts_per_parameter(adam):
        own["step"] = torch.zeros(())
    return {moment: own[moment] for moment in MOMENTS}


def _counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    """torch's Adam counts steps per parameter; those of transformer-engine and Apex per group of parameters."""
    return isinstance(adam, torch.optim.Adam)


def _steps(adam: torch.optim.Optimizer, updated: Tensor) -> int:
    if _counts_per_parameter(adam):
        return int(adam.state[updated]["step"])
    return int(adam.param_groups[0].get("step", 0))


def _placed(key: str, part: Tensor, dim: int | None, state: ParallelState) -> ShardedTensor:
    index, count = state.weights.rank(), state.weights.size()
    offsets = [] if dim is None else [(dim, index, count)]
    copy = state.weight_replica if dim is not None else state.weight_replica * count + index
    return ShardedTensor.from_rank_offsets(key, part, *offsets, replica_id=copy)
