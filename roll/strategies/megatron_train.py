"""A model split over ranks with Megatron-Core, run forward and trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.checkpoint.companions import announced_companions
from roll.checkpoint.hf import save_hf
from roll.checkpoint.sharded import load_common, load_sharded, save_sharded
from roll.checkpoint.training_state import restore_training_state, sharded_training_state
from roll.config import OptimizerSettings, StrategySettings
from roll.errors import UserError
from roll.models.family_tensors import to_family
from roll.models.hf_mapping import export_hf_gradients, export_hf_tensors
from roll.models.tied_embeddings import sum_tied_gradients
from roll.parallel.gradient_norm import gradient_norm
from roll.parallel.state import ParallelState
from roll.protocol import BROADCAST, DataProto, LossNormalizers, RowDelivery, count_loss_tokens
from roll.strategies.base import Metrics, TrainStrategy, check_response_mask
from roll.strategies.buckets import in_buckets
from roll.strategies.gradients import Gradients, ReplicatedGradients, ShardedGradients
from roll.strategies.megatron_infer import MegatronInferStrategy
from roll.strategies.micro_batch import Data, MicroBatch, Output
from roll.strategies.output import Loss, LossFunc
from roll.strategies.progress import EndOfSchedule, continued_steps, progress_of
from roll.strategies.tokens import TokenMicroBatch, next_token_loss


class MegatronTrainStrategy(MegatronInferStrategy, TrainStrategy):
    """Adds gradients, AdamW with Megatron-Core's optimizer, checkpoints and weights for other systems.

    Training draws no random numbers (there is no dropout), so a checkpoint holds none.
    """

    def __init__(self, settings: StrategySettings, state: ParallelState, rows: RowDelivery = BROADCAST) -> None:
        if settings.optimizer is None:
            raise UserError(f"strategy {settings.name} trains, so `optimizer` must be set; got null")
        super().__init__(settings, state, rows)
        self.optimizer_settings: OptimizerSettings = settings.optimizer
        self.grads: Gradients
        self.optimizer: MegatronOptimizer
        self.schedule: OptimizerParamScheduler

    @property
    def _stored_dtype(self) -> torch.dtype:
        return torch.float32

    def initialize(self) -> None:
        super().initialize()
        sharded = self.state.weight_mesh is not None
        self.grads = ShardedGradients(self.gpt) if sharded else ReplicatedGradients(self.gpt, self.state)
        self.model = self.grads.model
        self.optimizer = get_megatron_optimizer(
            _optimizer_config(self.optimizer_settings, self.gpt.config.params_dtype),
            [self.grads.trained],
            use_gloo_process_groups=False,
            pg_collection=self.state.megatron,
        )
        self.schedule = _schedule(self.optimizer_settings, self.optimizer)
        self._end_of_schedule = EndOfSchedule(self.optimizer_settings)
        self._companions = announced_companions(self.settings.model_path, speaks=self.state.rank == 0)

    def train_step(self, batch: DataProto, loss_func: LossFunc) -> Metrics:
        batch = self._deliver(batch, self._check_training_batch)
        normalizers = self._count_loss_tokens(batch)
        if normalizers.tokens == 0:
            return self._skipped()
        micro_batches, _ = self._cut(batch)
        micro_batches = [micro_batch.with_normalizers(normalizers) for micro_batch in micro_batches]
        return self._optimize(loss_func, self._pack(micro_batches), len(micro_batches), self.state.dp)

    def train_tokens(self, micro_batches: Sequence[TokenMicroBatch]) -> Metrics:
        """One optimizer step of next-token prediction, over micro-batches as `roll.data.load_accum_batch` gives them.

        Every rank has equally many, and the ranks that share a batch the same (in mode isp each its own part). The loss
        is the mean over all labels of the step, whatever rank and micro-batch they are on.

        Returns:
            As `train_step`, with `tokens`, the number of labels.
        """
        tokens, num_labels = self._labelled(micro_batches)
        if num_labels == 0:
            return self._skipped() | {"tokens": 0.0}
        loss_func = partial(next_token_loss, num_labels)
        metrics = self._optimize(loss_func, iter(tokens), len(tokens), self.state.megatron.dp_cp)
        return metrics | {"tokens": float(num_labels)}

    def _skipped(self) -> Metrics:
        """What a step without anything to learn from reports."""
        return {"lr": self._learning_rate(), "skipped_steps": 1.0}

    def _optimize(
        self,
        loss_func: Callable[[Data, Output], Loss],
        micro_batches: Iterator[MicroBatch[Data, Output]],
        count: int,
        sharers: ProcessGroup,
    ) -> Metrics:
        """Run `count` micro-batches forward and backward, and take the step; metrics are summed over `sharers`."""
        lr = self._learning_rate()
        self.model.train()
        self.grads.zero()
        self.optimizer.zero_grad()
        metrics = self._run_schedule(partial(_scheduled, loss_func), micro_batches, count, forward_only=False)
        self.grads.collect()
        if self.model_config.tie_word_embeddings and self.settings.head == "lm":
            sum_tied_gradients(self.gpt, self.state)
        grad_norm = self._grad_norm()
        stepped = math.isfinite(grad_norm)  # Weights survive a gradient that does not.
        if stepped:
            self._update(grad_norm)
        report = {"grad_norm": grad_norm, "lr": lr, "skipped_steps": float(not stepped)}
        return self._sum_metrics(metrics, sharers) | report

    def _check_training_batch(self, batch: DataProto) -> None:
        self._check_batch(batch)
        check_response_mask(batch)

    def _count_loss_tokens(self, batch: DataProto) -> LossNormalizers:
        """Response tokens and sequences of all shares of the step: what per-token losses are divided by."""
        local = count_loss_tokens(batch["response_mask"][:, 1:])
        counts = torch.tensor([local.tokens, local.sequences], dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=self.state.dp)
        return LossNormalizers(tokens=int(counts[0]), sequences=int(counts[1]))

    def _grad_norm(self) -> float:
        """L2 norm of all gradients of the model, before clipping; the same on every rank."""
        self.optimizer.prepare_grads()
        name = "get_main_grads_for_grad_norm"  # get_grads_for_grad_norm since Megatron-Core 0.19
        gradients = getattr(self.optimizer, name if hasattr(self.optimizer, name) else "get_grads_for_grad_norm")()
        return gradient_norm(gradients, (self.state.weights, self.state.pp), self.device)

    def _update(self, grad_norm: float) -> None:
        """Clip, and take the optimizer's and the schedule's step."""
        if self.state.rank == 0:
            self._end_of_schedule.check(self.schedule.num_steps)
        limit = self.optimizer_settings.max_grad_norm
        clip_grad_by_total_norm_fp32(self.optimizer.get_parameters(), limit, grad_norm)
        self.optimizer.step_with_ready_grads()
        self.schedule.step(increment=1)

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole gradient) of this stage's trained weights that the last `train_step` used, clipped.

        Collective over the ranks that share the weights. For inspection: optimizers read `main_grad` themselves.
        """
        yield from export_hf_gradients(self.gpt, self.state)

    def model_update(self, bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
        tensors = export_hf_tensors(self.gpt, self.state, dtype=self._dtype)
        yield from in_buckets(to_family(self.model_config, tensors), bucket_bytes)

    def save_checkpoint(self, folder: str | Path) -> None:
        sharded, steps = sharded_training_state(self.gpt, self.optimizer, self.state)
        progress = progress_of(self.optimizer_settings, self.schedule.num_steps)
        save_sharded(folder, {"tensors": sharded, "adam_steps": steps, "progress": progress})

    def load_checkpoint(self, folder: str | Path) -> None:
        # First, since loading writes into the live weights.
        steps = continued_steps(load_common(folder), self.optimizer_settings, speaks=self.state.rank == 0)
        sharded, _ = sharded_training_state(self.gpt, self.optimizer, self.state)
        loaded = load_sharded(folder, {"tensors": sharded})
        restore_training_state(self.gpt, self.optimizer, self.state, loaded["tensors"], loaded["adam_steps"])
        # Megatron-Core's own `load_state_dict` adds to the steps that were taken, and brings the old settings back.
        self.schedule.num_steps = steps
        self.schedule.step(increment=0)
        self._end_of_schedule = EndOfSchedule(self.optimizer_settings)

    def save_hf(self, folder: str | Path) -> None:
        save_hf(
            folder,
            self.gpt,
            self.model_config,
            self.state,
            dtype=self._dtype,
            source=self.settings.model_path,
            known=self._companions,
        )


def _scheduled(
    loss_func: Callable[[Data, Output], Loss], data: Data, output: Output
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A loss as Megatron-Core's schedules take it: loss, number of tokens, metrics with the loss among them."""
    loss, metrics = loss_func(data, output)
    # Clones: the schedule may scale the loss in place, and metrics outlive the step's graph.
    metrics = {name: torch.as_tensor(value).detach().clone() for name, value in (metrics | {"loss": loss}).items()}
    # No tokens are reported to the schedule, so it divides by nothing: the loss is already normalised.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics


def _optimizer_config(settings: OptimizerSettings, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
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
