"""Settings of a strategy. A run's config derives it per role; a user of the library writes it by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from roll.config.family_name import FamilyName
from roll.config.micro_batch import MicroBatchSettings
from roll.config.optimizer import OptimizerSettings
from roll.config.parallel import ParallelSettings
from roll.config.paths import PathSetting
from roll.config.problems import Check, Problem
from roll.config.settings import Seed, Settings

StrategyName = Literal["megatron_train", "megatron_infer", "hf"]
DType = Literal["float32", "bfloat16"]
Head = Literal["lm", "value"]


class StrategySettings(Settings):
    """One model, how it is split, and how it is run."""

    name: StrategyName
    """The strategy: Megatron-Core with or without an optimizer, or transformers in one process."""
    model_path: PathSetting
    """Folder in Hugging Face layout: config.json, and the weights if `init` is load."""
    family: FamilyName | None = None
    """Family of the model in `model_path`, one of your own as module:Name; null: the one whose model_type its
    config.json has."""
    init: Literal["load", "random"] = "load"
    """Whether weights come from `model_path` or are drawn from `seed`."""
    head: Head = "lm"
    """Head on the last hidden state: the vocabulary, or one value per token."""
    parallel: ParallelSettings = ParallelSettings()
    """Division of this strategy's ranks."""
    micro_batch: MicroBatchSettings = MicroBatchSettings()
    """Size of one forward pass."""
    optimizer: OptimizerSettings | None = None
    """Update of the weights; megatron_train needs it."""
    dtype: DType = "float32"
    """Type of weights and activations."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it before log-probabilities and entropies are taken."""
    batch_timeout_s: PositiveFloat = 60
    """Seconds for which ranks with a batch wait for those of their share that do not call."""
    token_chunk: PositiveInt = 1024
    """Tokens whose logits are turned into log-probabilities at once: it bounds memory, not results."""
    seed: Seed = 0
    """Seed of random weights."""

    def checks(self) -> Iterable[Check]:
        return (self._training_has_an_optimizer, self._hf_is_one_process)

    def _training_has_an_optimizer(self) -> Iterator[Problem]:
        if self.name == "megatron_train" and self.optimizer is None:
            yield Problem("optimizer", "strategy 'megatron_train' needs it, got null")

    def _hf_is_one_process(self) -> Iterator[Problem]:
        if self.name == "hf" and self.parallel.model_parallel_size > 1:
            degrees = f"tp {self.parallel.tp}, pp {self.parallel.pp}, cp {self.parallel.cp}"
            yield Problem("parallel", f"strategy 'hf' holds the model in one process, got {degrees}")
