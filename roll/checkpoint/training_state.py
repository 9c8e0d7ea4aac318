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
    """This rank's part of every weight and moment, to save from or to load into; and Adam's step count.

    Weights are in the precision that the optimizer updates, and untrained ones, which have no moments, in fp32.
    """
    adam = _adam(optimizer)
    sharded: dict[str, ShardedTensor] = {}
    steps = 0
    for mapped in mapped_parameters(gpt, state.mode):
        if mapped.trained:
            updated = _updated(mapped)
            kept = {"weight": updated.data, **_moments(adam, updated)}
            steps = _steps(adam, updated)
        else:
            kept = {"weight": mapped.local().float()}
        for kind, whole in kept.items():
            for name, part in zip(mapped.hf_names, whole.chunk(len(mapped.hf_names)), strict=True):
                sharded[f"{kind}/{name}"] = _placed(f"{kind}/{name}", part, mapped, state)
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
            if not mapped.trained:
                for name, part in zip(mapped.hf_names, mapped.parts(), strict=True):
                    part.copy_(loaded[f"weight/{name}"])
                continue
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


def _placed(key: str, part: Tensor, mapped: MappedParameter, state: ParallelState) -> ShardedTensor:
    if mapped.split is None:  # Only in modes that split weights over tp: each of these ranks has a copy as well.
        copy = state.split_replica("tp") * state.tp.size() + state.tp.rank()
        return ShardedTensor.from_rank_offsets(key, part, replica_id=copy)
    offset = (mapped.split.dim, *mapped.place(state))
    return ShardedTensor.from_rank_offsets(key, part, offset, replica_id=state.split_replica(mapped.split.over))
