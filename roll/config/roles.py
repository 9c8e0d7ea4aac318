"""The roles of a run: how many ranks each has, how they are divided, how the model is run there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, Strict

from roll.config.chosen import ChosenByName
from roll.config.engine import DEFAULT_ENGINE, EngineSettings, default_engine, engine_settings
from roll.config.micro_batch import MicroBatchSettings
from roll.config.optimizer import OptimizerSettings
from roll.config.parallel import ParallelSettings
from roll.config.problems import Check, Problem
from roll.config.settings import Settings
from roll.errors import UserError


class ModelRoleSettings(Settings):
    """Settings of every role that runs a model on Megatron-Core."""

    strategy: Literal["megatron_train", "megatron_infer"]
    """The strategy that runs the model."""
    world_size: PositiveInt = 1
    """Ranks (Ray actors) of this role."""
    parallel: ParallelSettings = ParallelSettings()
    """Division of these ranks."""
    micro_batch: MicroBatchSettings = MicroBatchSettings()
    """Size of one forward pass."""


class TrainRoleSettings(ModelRoleSettings):
    """The actor or the critic."""

    strategy: Literal["megatron_train"] = "megatron_train"
    """The strategy that runs the model; a trained role needs one that can train."""
    optimizer: OptimizerSettings
    """Update of the weights; a step is one mini-batch."""


class ReferenceSettings(ModelRoleSettings):
    """The frozen copy of the policy that the KL penalty compares with."""

    strategy: Literal["megatron_infer"] = "megatron_infer"
    """The strategy that runs the model; the reference is never trained."""


def _as_list(value: object) -> object:
    """A single token as a list of one; anything else as it is, for the setting's type to judge."""
    return [value] if type(value) in (str, int) else value


class RolloutSettings(Settings):
    """Generation of responses. Each rank holds a whole copy of the actor's weights."""

    world_size: PositiveInt = 1
    """Ranks (Ray actors), each of which takes a share of the prompts. Copies fill the last shares up. What is drawn
    depends on this number as on the seed."""
    engine: Annotated[EngineSettings, ChosenByName(engine_settings, DEFAULT_ENGINE)] = Field(
        default_factory=default_engine
    )
    """The engine that generates, one process per rank, by its name."""
    max_new_tokens: PositiveInt
    """Longest response in tokens, the end token included."""
    end_tokens: Annotated[tuple[int | str, ...] | None, Strict(False), BeforeValidator(_as_list)] = None
    """Tokens that end a response, as text or as ids, such as ["<|im_end|>", 5], or a single one; null: the end
    tokens of generation_config.json, config.json and tokenizer together."""
    weight_bucket_mb: PositiveFloat = 64
    """Size in MiB of the pieces in which the actor's weights arrive, of which two exist at a time."""
    sleep_while_training: bool = False
    """Whether the engine frees the memory of its weights and caches while the other roles work."""

    def checks(self) -> Iterable[Check]:
        return (self._something_ends_a_response,)

    def _something_ends_a_response(self) -> Iterator[Problem]:
        if self.end_tokens == ():
            yield Problem("end_tokens", "must name at least one token, or be null, got []")


def _module_and_function(value: str) -> str:
    module, colon, function = value.partition(":")
    if not (colon and function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UserError("must look like package.module:function")
    return value


class RewardSettings(Settings):
    """The score of a response."""

    environment: str = "single_turn"
    """The environment of an episode: a file of roll/environments, or one of your own as module:Name."""
    function: Annotated[str, AfterValidator(_module_and_function)] = "roll.data.tasks:score_responses"
    """The function that scores a batch of responses, as module:function; one number per response. An environment calls
    it as `self.given.score`."""
