"""A model split over ranks with Megatron-Core, run forward."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

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
from roll.data.sequence_split import SequenceSplit
from roll.errors import UserError
from roll.models.gpt import build_model
from roll.parallel.degrees import ParallelDegrees
from roll.parallel.state import ParallelState
from roll.platform import get_platform
from roll.protocol import BROADCAST, DataProto, RowDelivery, check_model_batch
from roll.strategies.base import InferenceStrategy, Metrics, different_names
from roll.strategies.data_input import batch_delivery
from roll.strategies.micro_batch import Data, MicroBatch, Output, RowMicroBatch
from roll.strategies.output import ForwardFunc, check_head
from roll.strategies.packed_output import OwnOutput
from roll.strategies.tokens import LabelledTokens, TokenMicroBatch, count_labels, next_token_loss

Result = TypeVar("Result")


class MegatronInferStrategy(InferenceStrategy):
    """Forward passes of a model of any family, under every mode with pipeline and data parallelism.

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
        self.model_config = ModelConfig.from_folder(settings.model_path, settings.family)
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
        self.gpt = build_model(
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
        results = self._run_schedule(forward_func, self._pack(micro_batches), len(micro_batches), forward_only=True)
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

    def _pack(self, micro_batches: list[DataProto]) -> Iterator[RowMicroBatch]:
        """This rank's tokens of the micro-batches, each packed when its turn comes."""
        return (RowMicroBatch.of(micro_batch, self.split) for micro_batch in micro_batches)

    @torch.no_grad()
    def token_loss(self, micro_batches: Sequence[TokenMicroBatch]) -> float:
        """Mean cross-entropy of the labels of all ranks' micro-batches, in nats.

        Every rank has equally many, and the ranks that share a batch the same (in mode isp each its own part).

        Returns:
            The same number on every rank of the last pipeline stage, and nan on the other stages; nan without labels.
        """
        tokens, num_labels = self._labelled(micro_batches)
        if num_labels == 0:
            return math.nan

        def forward(labels: Tensor, output: OwnOutput) -> dict[str, Tensor]:
            return {"loss": next_token_loss(num_labels, labels, output)[0]}

        self.model.eval()
        metrics = self._run_schedule(forward, iter(tokens), len(tokens), forward_only=True)
        return self._sum_metrics(metrics, self.state.megatron.dp_cp).get("loss", math.nan)

    def _labelled(self, micro_batches: Sequence[TokenMicroBatch]) -> tuple[list[LabelledTokens], int]:
        """This rank's tokens, and the number of labels of the whole step. Raises ValueError for a value head."""
        check_head(self.settings.head, "lm")
        tokens = [LabelledTokens.of(micro_batch, self.split) for micro_batch in micro_batches]
        return tokens, count_labels(tokens, self.state, self.model_config.vocab_size, self.device)

    def _sum_metrics(self, parts: list[dict[str, Tensor]], group: ProcessGroup) -> Metrics:
        """Metrics of all micro-batches of all ranks of `group`; empty on stages that compute no loss.

        Raises ValueError, on every rank of the group, if micro-batches have metrics of different names.
        """
        if not parts:
            return {}
        kinds = sorted({tuple(sorted(part)) for part in parts})
        # Sums of other names would be added up, or wait for ranks that have fewer.
        code = zlib.crc32(repr(kinds).encode())
        extremes = torch.tensor([code, -code], dtype=torch.int64, device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        if len(kinds) > 1 or extremes[0] != -extremes[1]:
            raise UserError(different_names(kinds))
        names = kinds[0]
        totals = torch.stack([torch.stack([part[name].double() for part in parts]).sum() for name in names])
        dist.all_reduce(totals, group=group)
        return dict(zip(names, totals.tolist(), strict=True))

    def _run_schedule(
        self,
        func: Callable[[Data, Output], Result],
        micro_batches: Iterator[MicroBatch[Data, Output]],
        count: int,
        *,
        forward_only: bool,
    ) -> list[dict[str, Tensor]]:
        """Megatron-Core's schedule over `count` micro-batches.

        Args:
            func: a forward function if `forward_only`, else a loss as the schedules take it.

        Returns:
            Results of the forward function, or metrics of the loss, of each micro-batch; none before the last stage.
        """
        common = {
            "forward_step_func": partial(self.inner_forward_step, func),
            "data_iterator": micro_batches,
            "model": [self.model],
            "num_microbatches": count,
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
        self,
        func: Callable[[Data, Output], Result],
        data_iterator: Iterator[MicroBatch[Data, Output]],
        model: nn.Module,
    ) -> tuple[Tensor, Callable[..., Result]]:
        """The next micro-batch through this stage: its padding is dropped, this rank's tokens are packed and run.

        Returns:
            The stage's output, and what the schedule calls with the last stage's output.
        """
        micro_batch = next(data_iterator)
        output = model(
            input_ids=micro_batch.input_ids,
            position_ids=None,  # They are part of the packed sequence.
            attention_mask=None,
            packed_seq_params=micro_batch.packed,
        )
        return output, partial(self._apply, func, micro_batch)

    def _apply(
        self,
        func: Callable[[Data, Output], Result],
        micro_batch: MicroBatch[Data, Output],
        tensor: Tensor,
        non_loss_data: bool = False,  # The schedule says so where it only runs forward; `func` is made for either.
    ) -> Result:
        """What `func` makes of the last stage's output for a micro-batch."""
        projection = self.gpt.head if self.settings.head == "lm" else None
        return func(micro_batch.data, micro_batch.output(OwnOutput(tensor, projection, self.settings, self.state.cp)))
