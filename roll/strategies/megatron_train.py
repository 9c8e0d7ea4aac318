"""A model split over ranks with Megatron-Core, run forward and trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from roll.checkpoint.hf import save_hf
from roll.checkpoint.sharded import load_sharded, save_sharded
from roll.config import OptimizerSettings, StrategySettings
from roll.data.micro_batches import cut_micro_batches
from roll.models.families import to_family
from roll.models.hf_mapping import export_hf_tensors
from roll.parallel.state import ParallelState
from roll.protocol import DataProto, LossNormalizers, count_loss_tokens
from roll.strategies.base import LossFunc, Metrics, TrainStrategy
from roll.strategies.buckets import in_buckets
from roll.strategies.megatron_infer import MegatronInferStrategy


class MegatronTrainStrategy(MegatronInferStrategy, TrainStrategy):
    """Adds gradients, AdamW with Megatron-Core's optimizer, checkpoints and weights for other systems.

    Training draws no random numbers (there is no dropout), so a checkpoint holds none.
    """

    def __init__(self, settings: StrategySettings, state: ParallelState) -> None:
        if settings.optimizer is None:
            raise ValueError(f"strategy {settings.name} trains, so `optimizer` must be set; got null")
        super().__init__(settings, state)
        self.optimizer_settings: OptimizerSettings = settings.optimizer
        self.ddp: DistributedDataParallel
        self.optimizer: MegatronOptimizer
        self.schedule: OptimizerParamScheduler

    def initialize(self) -> None:
        super().initialize()
        settings = self.optimizer_settings
        self.ddp = DistributedDataParallel(
            self.gpt.config,
            # Gradients are plain sums: see `megatron_config`.
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False),
            self.gpt,
            pg_collection=self.state.megatron,
        )
        self.ddp.broadcast_params()
        self.model = self.ddp
        self.gpt.config.no_sync_func = self.ddp.no_sync
        self.gpt.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(settings, self.settings.dtype),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=self.state.megatron,
        )
        self.schedule = _schedule(settings, self.optimizer)

    def train_step(self, batch: DataProto, loss_func: LossFunc) -> Metrics:
        batch = self.get_data_input(batch)
        normalizers = self._count_loss_tokens(batch)
        lr = self._learning_rate()
        if normalizers.tokens == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "lr": lr, "skipped_steps": 1.0}
        micro_batches, _ = cut_micro_batches(batch, self.settings.micro_batch, self.state.at.dp)
        micro_batches = [micro_batch.with_normalizers(normalizers) for micro_batch in micro_batches]

        self.model.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = self._run_schedule(micro_batches, loss_func, forward_only=False)
        grad_norm = self._grad_norm()
        stepped = math.isfinite(grad_norm)  # Weights survive a gradient that does not.
        if stepped:
            self.optimizer.step()
            self.schedule.step(increment=1)
        return self._sum_metrics(metrics) | {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not stepped)}

    def _count_loss_tokens(self, batch: DataProto) -> LossNormalizers:
        """Response tokens and sequences of all shares of the step: what per-token losses are divided by."""
        if "response_mask" not in batch.tensors:
            raise ValueError("a training batch needs `response_mask`, which says which tokens are learned from")
        local = count_loss_tokens(batch["response_mask"][:, 1:])
        counts = torch.tensor([local.tokens, local.sequences], dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=self.state.dp)
        return LossNormalizers(tokens=int(counts[0]), sequences=int(counts[1]))

    def _grad_norm(self) -> float:
        """L2 norm of all gradients of the model, before clipping; the same on every rank."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _sum_metrics(self, parts: list[dict[str, Tensor]]) -> Metrics:
        """Metrics of all micro-batches and shares; empty on stages that compute no loss."""
        if not parts:
            return {}
        names = sorted(parts[0])
        totals = torch.stack([torch.stack([part[name].double() for part in parts]).sum() for name in names])
        dist.all_reduce(totals, group=self.state.dp)
        return dict(zip(names, totals.tolist(), strict=True))

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole gradient) of this stage after `train_step`, before clipping was applied to it.

        Collective over the tensor-parallel group. For inspection: optimizers read `main_grad` themselves.
        """
        yield from export_hf_tensors(self.gpt, self.settings.head, self.state.tp, of="main_grad")

    def model_update(self, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
        tensors = export_hf_tensors(self.gpt, self.settings.head, self.state.tp)
        yield from in_buckets(to_family(self.model_config, tensors), bucket_bytes)

    def save_checkpoint(self, folder: Path) -> None:
        save_sharded(Path(folder), self._sharded_state(is_loading=False))

    def load_checkpoint(self, folder: Path) -> None:
        loaded = load_sharded(Path(folder), self._sharded_state(is_loading=True))
        self.gpt.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.schedule.load_state_dict(loaded["schedule"])

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        model = self.gpt.sharded_state_dict(metadata={"dp_cp_group": self.state.megatron.dp_cp})
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading),
            "schedule": self.schedule.state_dict(),
        }

    def save_hf(self, folder: Path) -> None:
        save_hf(
            Path(folder),
            self.gpt,
            self.settings.head,
            self.model_config,
            self.state,
            tokenizer_from=Path(self.settings.model_path),
        )


def _optimizer_config(settings: OptimizerSettings, dtype: str) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.max_grad_norm,
        bf16=dtype == "bfloat16",
        params_dtype=getattr(torch, dtype),
    )


def _schedule(settings: OptimizerSettings, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(settings.total_steps or 0, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
