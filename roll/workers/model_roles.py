"""The roles that hold a model on Megatron-Core: actor, critic and reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from roll.algorithms import LossTerm, total_loss
from roll.algorithms.loss_term import TOKENS
from roll.config import StrategySettings
from roll.parallel.state import init_parallel
from roll.protocol import DataProto
from roll.strategies import MegatronInferStrategy, MegatronTrainStrategy, Metrics, ModelOutput
from roll.workers.dispatch import Dispatch
from roll.workers.method import register
from roll.workers.role import Role
from roll.workers.weight_sync import WeightSource
from roll.workers.worker import Worker


class ReferenceWorker(Worker):
    """A frozen policy."""

    def __init__(self, *, settings: StrategySettings, timeout_s: float, **rank: Any) -> None:
        super().__init__(**rank)
        self.settings = settings
        self.timeout_s = timeout_s
        self.strategy: MegatronInferStrategy

    @register(Dispatch.ONE_TO_ALL)
    def initialize(self) -> None:
        """Make the groups and load the model."""
        state = init_parallel(self.settings.parallel, timeout_s=self.timeout_s)
        make = MegatronTrainStrategy if self.settings.name == "megatron_train" else MegatronInferStrategy
        self.strategy = make(self.settings, state, self.delivery)
        self.strategy.initialize()

    @register(Dispatch.DP_MP_DISPATCH_FIRST, fields=TOKENS, returns_batch=True)
    def compute_log_probs(self, batch: DataProto) -> DataProto | None:
        """`log_probs` and `entropy` of the response tokens, `[B, S-1]`."""

        def forward(data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
            log_probs, entropy = output.log_probs_and_entropy(data["input_ids"], data["response_mask"])
            return {"log_probs": log_probs, "entropy": entropy}

        return _as_batch(self.strategy.forward_step(batch, forward))


class Reference(Role, ReferenceWorker):
    """All ranks of the frozen policy."""


class TrainWorker(WeightSource, ReferenceWorker):
    """A model that is trained."""

    strategy: MegatronTrainStrategy

    @register(Dispatch.DP_MP_DISPATCH_FIRST)
    def train(self, batch: DataProto, terms: Sequence[LossTerm]) -> Metrics:
        """One optimizer step of the sum of `terms`; `batch` has the fields that they read."""
        return self.strategy.train_step(batch, partial(total_loss, terms))

    @register(Dispatch.ONE_TO_ALL)
    def save_hf(self, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder."""
        self.strategy.save_hf(folder)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights, optimizer and schedule."""
        self.strategy.save_checkpoint(folder)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str | Path) -> None:
        """Continue from `save_checkpoint`."""
        self.strategy.load_checkpoint(folder)


class ActorWorker(TrainWorker):
    """The policy."""


class Actor(Role, ActorWorker):
    """All ranks of the policy."""


class CriticWorker(TrainWorker):
    """The value function."""

    @register(Dispatch.DP_MP_DISPATCH_FIRST, fields=TOKENS, returns_batch=True)
    def compute_values(self, batch: DataProto) -> DataProto | None:
        """`values` of the states before each response token, `[B, S-1]`."""

        def forward(data: DataProto, output: ModelOutput) -> dict[str, Tensor]:
            return {"values": output.values(data["response_mask"])}

        return _as_batch(self.strategy.forward_step(batch, forward))


class Critic(Role, CriticWorker):
    """All ranks of the value function."""


def _as_batch(results: dict[str, Tensor] | None) -> DataProto | None:
    """Results of the reporting rank, on the CPU for the way to the driver."""
    return None if results is None else DataProto.from_dict(results).to("cpu")
