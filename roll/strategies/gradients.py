"""Where the gradients of a step are collected: one interface, and the two ways in which weights are held.

After the schedule has run, `collect` leaves the whole gradient of the step (summed over micro-batches and all ranks
that worked on it) in `main_grad` of every parameter, in fp32, and in that of what the optimizer updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from torch import nn

from roll.parallel.state import ParallelState


class Gradients(ABC):
    """`model` is what the schedule runs; `trained` is the module whose parameters the optimizer updates."""

    model: nn.Module
    trained: nn.Module

    @abstractmethod
    def zero(self) -> None:
        """Forget the last step's gradients."""

    @abstractmethod
    def collect(self) -> None:
        """Make `main_grad` complete; called when the schedule has ended."""


class ReplicatedGradients(Gradients):
    """Every data-parallel rank has the same weights: Megatron-Core's wrapper sums their gradients in one buffer."""

    def __init__(self, gpt: GPTModel, state: ParallelState) -> None:
        self.ddp = DistributedDataParallel(
            gpt.config,
            # Gradients are plain sums: see `megatron_config`.
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False),
            gpt,
            pg_collection=state.megatron,
        )
        self.ddp.broadcast_params()
        self.model = self.trained = self.ddp
        gpt.config.no_sync_func = self.ddp.no_sync
        gpt.config.finalize_model_grads_func = finalize_model_grads

    def zero(self) -> None:
        self.ddp.zero_grad_buffer()

    def collect(self) -> None:
        """The schedule has called `finalize_model_grads` already."""


class ShardedGradients(Gradients):
    """Weights are split while they are not used (mode isp): FSDP2 has summed and split every block's gradients."""

    def __init__(self, gpt: GPTModel) -> None:
        self.model = gpt
        self.trained = LocalShards(gpt)

    def zero(self) -> None:
        self.model.zero_grad()

    def collect(self) -> None:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            parameter.main_grad = parameter.grad  # type: ignore[attr-defined]
            parameter.main_param.main_grad = parameter.grad.to_local()  # type: ignore[attr-defined, union-attr]


class LocalShards(nn.Module):
    """This rank's part of every trained parameter, a plain parameter over the same memory: what the optimizer updates.

    Megatron-Core's optimizer is so the same in every mode; DTensors it knows only of its own wrapper.
    """

    def __init__(self, gpt: GPTModel) -> None:
        super().__init__()
        self.ddp_config = DistributedDataParallelConfig()
        for name, parameter in gpt.named_parameters():
            if not parameter.requires_grad:
                continue
            shard = nn.Parameter(parameter.data.to_local())
            # As Megatron-Core's mixed-precision optimizer marks what it updates in a parameter's place.
            parameter.main_param = shard
            shard.shared = getattr(parameter, "shared", False)  # type: ignore[attr-defined]
            self.register_parameter(name.replace(".", "/"), shard)
