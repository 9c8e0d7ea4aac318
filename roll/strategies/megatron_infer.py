"""A model split over ranks with Megatron-Core, run forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from roll.checkpoint.hf import load_weights
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ModelConfig, StrategySettings, check_parallel
from roll.data.micro_batches import check_dealt, cut_micro_batches, join_results
from roll.data.packing import PackedRows, pack_rows
from roll.data.sequence_split import HeldTokens, SequenceSplit
from roll.errors import UserError
from roll.models.internlm2 import build_internlm2
from roll.models.packed_sequence import PackedSequence
from roll.parallel.degrees import ParallelDegrees
from roll.parallel.sequence_gather import gather_sequence
from roll.parallel.state import ParallelState
from roll.platform import get_platform
from roll.protocol import BROADCAST, DataProto, RowDelivery, check_model_batch
from roll.strategies.base import (
    ForwardFunc,
    InferenceStrategy,
    LossFunc,
    Metrics,
    ModelOutput,
    check_has_logits,
)
from roll.strategies.data_input import batch_delivery
from roll.strategies.tokens import OwnTokens, TokenMicroBatch, count_labels, token_forward_step


@dataclass(frozen=True)
class PackedOutput(ModelOutput):
    """The last stage's output for a packed micro-batch: hidden states `[1, T, H]`, or values `[1, T, 1]`; those of this
    rank's tokens where the sequence is split.
    """

    rows: PackedRows
    held: HeldTokens


class MegatronInferStrategy(InferenceStrategy):
    """Forward passes of an InternLM2 or a relative, under every mode with pipeline and data parallelism.

    Every rank of the world constructs one with the same settings and calls the same methods in the same order.

        state = init_parallel(settings.parallel)
        strategy = MegatronInferStrategy(settings, state)
        strategy.initialize()

    Args:
        rows: which ranks of a data-parallel share are given its rows; by default the leader, which broadcasts them.
    """

    def __init__(self, settings: StrategySettings, state: ParallelState, rows: RowDelivery = BROADCAST) -> None:
        super().__init__(settings)
        self.state = state
        self.model_config = ModelConfig.from_folder(settings.model_path)
        self._check_degrees()
        self.device = get_platform().device()
        self.split = SequenceSplit(settings.parallel, state.cp.rank())
        self.delivery = batch_delivery(state, device=self.device, timeout_s=settings.batch_timeout_s, rows=rows)
        self.gpt: GPTModel
        self.model: nn.Module

    def _check_degrees(self) -> None:
        """Whether the model can be split as the settings say, and the groups were made for these settings.

        Raises:
            ValueError: on every rank alike; all problems are listed.
        """
        parallel, world_size = self.settings.parallel, self.state.degrees.world_size
        problems = check_parallel(self.model_config, parallel, world_size)
        if not problems:
            asked = parallel.mode, ParallelDegrees.of(parallel, world_size)
            made = self.state.mode, self.state.degrees
            if asked != made:
                problems = [f"parallel: the settings say {parallel}, the groups were made for {made}"]
        if problems:
            raise UserError("\n".join(problems))

    def initialize(self) -> None:
        settings = self.settings
        source = tensor_source(
            settings.model_path, self.model_config, init=settings.init, head=settings.head, seed=settings.seed
        )
        self.gpt = build_internlm2(
            self.model_config,
            settings.parallel,
            self.state,
            dtype=self._dtype,
            head=settings.head,
            stored_dtype=self._stored_dtype,
        )
        load_weights(self.gpt, source, self.state)
        self.model = self.gpt.eval()

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    @property
    def _stored_dtype(self) -> torch.dtype | None:
        """What weights are kept in that are split while they are not used; None for the dtype they are used in."""
        return None

    def get_data_input(self, batch: DataProto, keys: Sequence[str] | None = None) -> DataProto:
        """Two levels: first over the tensor x context ranks of the first stage, then along each pipeline.

        The leader (tp 0, cp 0, first stage) checks its batch; a refusal travels in the batch's place, and every rank of
        every share raises it. The other ranks may call with an empty `DataProto()`. All have the leader's `meta_info`
        afterwards, apart from `metrics`. `non_tensor_batch` goes along only when the leader's
        `meta_info["_broadcast_non_tensor_batch"]` is true, and of the tensors only `keys`, if any are named.

        Raises:
            ValueError: as said, or a rank brings rows of another kind, or an entry of `meta_info` that the leader lacks
                or has with another value.
            MissingRanks: a rank did not call within `settings.batch_timeout_s`.
        """
        return self._deliver(batch, self._check_batch, keys)

    def _deliver(
        self, batch: DataProto, check: Callable[[DataProto], None], keys: Sequence[str] | None = None
    ) -> DataProto:
        return self.delivery.deliver(batch, keys=keys, check=check)

    def _check_batch(self, batch: DataProto) -> None:
        config = self.model_config
        check_model_batch(batch, vocab_size=config.vocab_size, max_positions=config.context_length)
        check_dealt(batch, self.state.at.dp, self.state.degrees.dp)

    @torch.no_grad()
    def forward_step(self, batch: DataProto, forward_func: ForwardFunc) -> dict[str, Tensor] | None:
        batch = self.get_data_input(batch)
        micro_batches, order = self._cut(batch)
        self.model.eval()
        forward = partial(self.inner_forward_step, forward_func)
        results = self._run_schedule(micro_batches, forward, forward_only=True)
        return join_results(results, order) if self.state.is_reporter else None

    def _cut(self, batch: DataProto) -> tuple[list[DataProto], list[int]]:
        """The micro-batches of this rank's share, and its row numbers in their order.

        Where shares gather weights together (mode isp), all have the same number of micro-batches: empty ones fill up.
        """
        micro_batches, order = cut_micro_batches(batch, self.settings.micro_batch, self.state.at.dp)
        if self.state.weight_mesh is not None and self.state.dp.size() > 1:
            most = torch.tensor(len(micro_batches), device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.state.dp)
            micro_batches += [batch.select_idxs([])] * (int(most) - len(micro_batches))
        return micro_batches, order

    @torch.no_grad()
    def token_loss(self, micro_batches: Sequence[TokenMicroBatch]) -> float:
        """Mean cross-entropy of the labels of all ranks' micro-batches, in nats.

        Every rank has equally many, and the ranks that share a batch the same (in mode isp each its own part).

        Returns:
            The same number on every rank of the last pipeline stage, and nan on the other stages; nan without labels.
        """
        own_tokens = [OwnTokens.of(micro_batch, self.split) for micro_batch in micro_batches]
        num_labels = count_labels(own_tokens, self.state, self.model_config.vocab_size, self.device)
        if num_labels == 0:
            return math.nan
        self.model.eval()
        forward = partial(token_forward_step, self.gpt, num_labels, self.settings.token_chunk)
        metrics = self._run_schedule(own_tokens, forward, forward_only=True)
        return self._sum_metrics(metrics, self.state.megatron.dp_cp).get("loss", math.nan)

    def _sum_metrics(self, parts: list[dict[str, Tensor]], group: ProcessGroup) -> Metrics:
        """Metrics of all micro-batches of all ranks of `group`; empty on stages that compute no loss."""
        if not parts:
            return {}
        names = sorted(parts[0])
        totals = torch.stack([torch.stack([part[name].double() for part in parts]).sum() for name in names])
        dist.all_reduce(totals, group=group)
        return dict(zip(names, totals.tolist(), strict=True))

    def _run_schedule(
        self, micro_batches: list[Any], forward_step_func: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """Megatron-Core's schedule over the micro-batches; what was computed of each output, on the last stage."""
        common = {
            "forward_step_func": forward_step_func,
            "data_iterator": iter(micro_batches),
            "model": [self.model],
            "num_microbatches": len(micro_batches),
            "seq_length": 1,  # The real shapes are exchanged: variable_seq_lengths.
            "micro_batch_size": 1,
            "forward_only": forward_only,
            "collect_non_loss_data": forward_only,
            "pg_collection": self.state.megatron,
        }
        if self.state.degrees.pp == 1:
            return forward_backward_no_pipelining(**common)
        communicator = P2PCommunicator(pp_group=self.state.pp, config=self.gpt.config)
        return forward_backward_pipelining_without_interleaving(**common, p2p_communicator=communicator)

    def inner_forward_step(
        self, func: ForwardFunc | LossFunc, data_iterator: Iterator[DataProto], model: nn.Module
    ) -> tuple[Tensor, partial[Any]]:
        """One micro-batch through this stage: drop the padding, pack, take this rank's tokens, run.

        Returns:
            The stage's output, and what the schedule calls with the last stage's output.
        """
        micro_batch = next(data_iterator)
        rows = pack_rows(
            micro_batch["input_ids"],
            micro_batch["attention_mask"],
            multiple_of=self.settings.parallel.row_multiple,
            segment_multiple_of=self.settings.parallel.segment_multiple,
        )
        packed = PackedSequence.of(rows, self.split)
        output = model(
            input_ids=packed.own(rows.input_ids),
            position_ids=None,  # They are part of the packed sequence.
            attention_mask=None,
            packed_seq_params=packed,
        )
        return output, partial(self._apply, func, micro_batch, rows, packed.held)

    def _apply(
        self,
        func: Any,
        micro_batch: DataProto,
        rows: PackedRows,
        held: HeldTokens,
        output: Tensor,
        non_loss_data: bool = False,
    ) -> Any:
        result = func(micro_batch, PackedOutput(output, rows, held))
        if non_loss_data:
            return result
        loss, metrics = result
        # Clones: the schedule may scale the loss in place, and metrics outlive the step's graph.
        metrics = {name: torch.as_tensor(value).detach().clone() for name, value in metrics.items()}
        # No tokens are reported to the schedule, so it divides by nothing: the loss is already normalised.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics | {"loss": loss.detach().clone()}

    def op_compute_log_probs(self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self._log_probs(output, input_ids, attention_mask, with_entropy=False)[0]

    def op_compute_entropy(self, output: ModelOutput, attention_mask: Tensor) -> Tensor:
        # Entropy does not depend on which token was drawn, so any targets do.
        any_ids = torch.zeros_like(attention_mask)
        return self._log_probs(output, any_ids, attention_mask, with_entropy=True)[1]

    def op_compute_log_probs_and_entropy(
        self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._log_probs(output, input_ids, attention_mask, with_entropy=True)

    def _log_probs(
        self, output: ModelOutput, input_ids: Tensor, attention_mask: Tensor, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(output, PackedOutput)
        log_probs, entropy = self.gpt.head.log_probs(
            output.tensor,
            output.held.own(output.rows.next_tokens(input_ids)).unsqueeze(0),
            temperature=self.settings.temperature,
            chunk=self.settings.token_chunk,
            with_entropy=with_entropy,
        )
        own = [log_probs] if entropy is None else [log_probs, entropy]
        per_row = self._per_row(torch.stack(own, dim=-1), output, attention_mask)
        return per_row[0], per_row[-1]

    def _per_row(self, own: Tensor, output: PackedOutput, attention_mask: Tensor) -> list[Tensor]:
        """What this rank has of its own tokens, `[1, t, kinds]`, of all tokens at their rows, `[b, S-1]` each.

        All ranks that share the batch get all of it, so all compute the same loss; in backward each follows its own
        tokens, and the sum of the ranks' gradients is that of the loss.
        """
        whole = self._of_all_tokens(own, output)
        wanted = attention_mask[:, 1:].bool()
        return [torch.where(wanted, output.rows.unpack_next(kind), 0.0) for kind in whole.unbind(-1)]

    def _of_all_tokens(self, own: Tensor, output: PackedOutput) -> Tensor:
        """`[1, T/n, ...]` of this rank's tokens to `[T, ...]` of all tokens of the packed row."""
        return output.held.in_order(gather_sequence(own, self.state.cp), dim=1)[0]

    def op_compute_logits(self, output: ModelOutput) -> Tensor:
        """Logits of the packed row at temperature 1, for loss functions that need more than log-probs.

        Under context parallelism (mode isp too) a rank has the logits of its own tokens, `output.held` says which. A
        loss over what a rank has is summed over the ranks by its gradients; as a metric it is reported as this rank's
        part.

        Returns:
            `[1, T/n, V/tp]` for n = cp or sp; `[1, T/n, V]` with `parallel.parallel_output` false.
        """
        check_has_logits(self.settings.head)
        logits: Tensor = self.gpt.head.logits(output.tensor, parallel_output=self.settings.parallel.parallel_output)
        return logits

    def op_compute_row_logits(self, output: ModelOutput) -> Tensor:
        """Logits of all tokens at their rows: `op_compute_logits` unpacked, on all ranks that share the batch.

        Returns:
            `[b, S, V/tp]`, with the vocabulary as `op_compute_logits` has it.
        """
        assert isinstance(output, PackedOutput)
        return output.rows.unpack(self._of_all_tokens(self.op_compute_logits(output), output))

    def op_compute_values(self, output: ModelOutput, attention_mask: Tensor) -> Tensor:
        assert isinstance(output, PackedOutput)
        return self._per_row(output.tensor, output, attention_mask)[0]
