"""The config of a whole PPO run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints

from roll.config.algorithm import PPOSettings
from roll.config.model_source import ModelSource
from roll.config.ppo_checks import ppo_checks
from roll.config.problems import Check
from roll.config.roles import (
    ModelRoleSettings,
    ReferenceSettings,
    RewardSettings,
    RolloutSettings,
    TrainRoleSettings,
    WarmStartSettings,
)
from roll.config.settings import Settings
from roll.config.strategy import DType, FolderPath, Head, RowsOn, StrategySettings

Delivery = Literal["object_store", "broadcast"]
Role = Literal["actor", "critic", "reference", "rollout", "warm_start"]


def _prompt_template(value: str) -> str:
    try:
        fields = [field for field in Formatter().parse(value) if field[1] is not None]
    except ValueError as error:
        raise ValueError(f"is not a format string ({error})") from error
    plain = all(name is not None and name.isidentifier() and not (spec or how) for _, name, spec, how in fields)
    if not (fields and plain):
        raise ValueError("must say what is filled in, by plain names in braces such as {question}")
    return value


class TaskSettings(Settings):
    """The problems: a data set of reasoning-gym, drawn from the run's seed."""

    name: str = "chain_sum"
    """Name of the data set in reasoning-gym."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of that data set, as reasoning-gym names them."""
    prompt: Annotated[str, AfterValidator(_prompt_template)] = "{question}"
    """Template of a prompt: {question} is the problem's text, and each key of its metadata has a name as well."""
    max_prompt_tokens: PositiveInt
    """Longest prompt in tokens; a longer one is refused."""
    train_size: PositiveInt
    """Problems to train on."""
    eval_size: PositiveInt
    """Held-out problems, none of which is trained on."""


class RaySettings(Settings):
    """The Ray cluster that holds the roles."""

    address: str | None = None
    """Address of a running cluster; null: the one around this process if there is one, or else a local one."""
    call_timeout_s: PositiveFloat = 3600
    """Longest time in seconds that one call to a role may take."""
    start_timeout_s: PositiveFloat = 300
    """Seconds within which the processes of a role must have started."""
    placement_timeout_s: PositiveFloat = 30
    """Seconds for which a run waits for CPUs and devices that another run holds."""
    delivery: Delivery = "object_store"
    """How the rows of a batch reach the ranks that share it: all take them from Ray's object store, which is one memory
    for all ranks of a host; or the leader does, and broadcasts them over the process groups."""
    num_cpus: PositiveInt | None = None
    """CPUs that a local cluster offers; null: those of the machine."""


class PPOConfig(Settings):
    """A whole PPO run. What it derives for each role: `config.strategy_settings("actor", model_path)`."""

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
    """Name of the run, and of its folder under `output_dir`."""
    output_dir: FolderPath = Path("runs")
    """Folder that holds the folders of runs, seen from the working directory."""
    seed: NonNegativeInt = 0
    """Seed of everything that is random."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of every log-probability and entropy."""
    dtype: DType = "float32"
    """Type of weights and activations of all roles."""
    model: ModelSource
    """Where the model comes from."""
    task: TaskSettings
    """What the model learns."""
    warm_start: WarmStartSettings | None = None
    """The supervised phase that makes the model; given if, and only if, model.config is."""
    ppo: PPOSettings
    """The algorithm."""
    actor: TrainRoleSettings
    """The policy."""
    critic: TrainRoleSettings
    """The value function."""
    reference: ReferenceSettings = ReferenceSettings()
    """The frozen policy of the KL penalty."""
    rollout: RolloutSettings
    """Generation."""
    reward: RewardSettings = RewardSettings()
    """Scoring."""
    ray: RaySettings = RaySettings()
    """The cluster."""
    process_group_timeout_s: PositiveFloat = 600
    """Seconds after which a collective that some rank never joins is an error."""
    batch_timeout_s: PositiveFloat = 60
    """Seconds for which ranks with a batch wait for those of their share that are not called."""

    def checks(self) -> Iterable[Check]:
        return ppo_checks(self)

    @property
    def run_dir(self) -> Path:
        """The folder of this run."""
        return self.output_dir / self.name

    @property
    def rows_on(self) -> RowsOn:
        """Which ranks are given the rows of a batch."""
        return "every_rank" if self.ray.delivery == "object_store" else "leader"

    def strategy_settings(self, role: Role, model_path: Path) -> StrategySettings:
        """What the strategy of `role` is built from.

        Args:
            role: `warm_start` for the supervised phase: random weights, and log-probabilities at temperature 1.
            model_path: folder of the model, which is not `model.path` if the warm start made it.
        """
        common: dict[str, Any] = {"model_path": model_path, "dtype": self.dtype, "seed": self.seed}
        if role == "rollout":
            return StrategySettings(name=self.rollout.strategy, temperature=self.temperature, **common)
        common |= {"rows_on": self.rows_on, "batch_timeout_s": self.batch_timeout_s}
        if role == "warm_start":
            assert self.warm_start is not None, "a model that was loaded has no warm start"
            common |= _model_role(self.warm_start)
            return StrategySettings(name="megatron_train", init="random", optimizer=self.warm_start.optimizer, **common)
        common["temperature"] = self.temperature
        if role == "reference":
            return StrategySettings(name=self.reference.strategy, **common, **_model_role(self.reference))
        head: Head = "value" if role == "critic" else "lm"
        train = self.critic if role == "critic" else self.actor
        common |= _model_role(train)
        return StrategySettings(name=train.strategy, head=head, optimizer=train.optimizer, **common)


def _model_role(settings: ModelRoleSettings) -> dict[str, Any]:
    return {"parallel": settings.parallel, "micro_batch": settings.micro_batch}
