"""The config of a whole PPO run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints

from roll.config.algorithm import PPOSettings
from roll.config.family_name import FamilyName
from roll.config.model import ModelConfig
from roll.config.paths import PathSetting
from roll.config.ppo_checks import ppo_checks
from roll.config.problems import Check
from roll.config.roles import (
    ModelRoleSettings,
    ReferenceSettings,
    RewardSettings,
    RolloutSettings,
    TrainRoleSettings,
)
from roll.config.settings import Settings
from roll.config.sft import SFTConfig
from roll.config.strategy import DType, Head, StrategySettings
from roll.config.task import TaskSettings

Delivery = Literal["object_store", "broadcast"]
Role = Literal["actor", "critic", "reference", "rollout"]


class RaySettings(Settings):
    """The Ray cluster that holds the roles."""

    address: str | None = None
    """Address of a running cluster; null: the one around this process if there is one, or else a local one."""
    connect_timeout_s: PositiveFloat = 25
    """Seconds within which a running cluster must answer."""
    call_timeout_s: PositiveFloat = 3600
    """Longest time in seconds that one call to a role may take."""
    start_timeout_s: PositiveFloat = 300
    """Seconds within which the processes of a role must have started."""
    placement_timeout_s: PositiveFloat = 30
    """Seconds for which a run waits for CPUs and devices that another run holds."""
    delivery: Delivery = "object_store"
    """Way of a batch's rows to the ranks that share it: all take them from Ray's object store, which is one memory
    for all ranks of a host; or the leader does, and broadcasts them over the process groups."""
    num_cpus: PositiveInt | None = None
    """CPUs that a local cluster offers; null: those of the machine."""


class PPOConfig(Settings):
    """A whole PPO run. What it derives for each role: `config.strategy_settings("actor", model_path)`."""

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
    """Name of the run, and of its folder under `output_dir`."""
    output_dir: PathSetting = Path("runs")
    """Folder that holds the folders of runs, seen from the working directory;
    `~` is the home folder, as in every path."""
    seed: NonNegativeInt = 0
    """Seed of everything that is random, but for the problems and the warm start, which have their own."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of every log-probability and entropy."""
    dtype: DType = "float32"
    """Type of weights and activations of all roles."""
    model_path: PathSetting | None = None
    """Folder in Hugging Face layout that the run starts from, seen from the working directory; null: what warm_start
    makes."""
    family: FamilyName | None = None
    """Family of the model in `model_path`, one of your own as module:Name; null: the one whose model_type its
    config.json has. A warm start has `model.family` for its own."""
    trust_remote_code: bool = False
    """Whether code that lies in `model_path`, or that it names, may run: the tokenizer's, where there is no
    tokenizer.json. A warm start has `model.trust_remote_code` for its own."""
    warm_start: SFTConfig | None = None
    """The supervised run whose final model this run starts from, which runs first where it has not run yet; given if,
    and only if, there is no model_path."""
    task: TaskSettings
    """Task that the model learns."""
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
    def architecture(self) -> ModelConfig:
        """The architecture of the model. Raises ConfigError if the folder that has it is unusable."""
        if self.warm_start is not None:
            return self.warm_start.model.architecture
        assert self.model_path is not None, "exactly one of model_path and warm_start is set"
        return ModelConfig.from_folder(self.model_path, self.family)

    @property
    def folder_family(self) -> str | None:
        """Name of the family for the folder that the run starts from; None: the one that its config.json names."""
        return self.family if self.warm_start is None else self.warm_start.model.folder_family

    @property
    def trusts_remote_code(self) -> bool:
        """Whether code of the model folder may run; a warm start's final model has that of the folder it came from."""
        return self.trust_remote_code if self.warm_start is None else self.warm_start.model.trust_remote_code

    def strategy_settings(self, role: Role, model_path: Path) -> StrategySettings:
        """Settings that the strategy of `role` is built from.

        Args:
            model_path: folder of the model: `model_path`, or the one that the warm start made.
        """
        common: dict[str, Any] = {"model_path": model_path, "family": self.folder_family}
        common |= {"dtype": self.dtype, "seed": self.seed}
        if role == "rollout":
            return StrategySettings(name="hf", temperature=self.temperature, **common)
        common |= {"temperature": self.temperature, "batch_timeout_s": self.batch_timeout_s}
        if role == "reference":
            return StrategySettings(name=self.reference.strategy, **common, **_model_role(self.reference))
        head: Head = "value" if role == "critic" else "lm"
        train = self.critic if role == "critic" else self.actor
        common |= _model_role(train)
        return StrategySettings(name=train.strategy, head=head, optimizer=train.optimizer, **common)


def _model_role(settings: ModelRoleSettings) -> dict[str, Any]:
    return {"parallel": settings.parallel, "micro_batch": settings.micro_batch}
