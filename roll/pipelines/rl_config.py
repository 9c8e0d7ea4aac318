"""The config of a whole run of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import PositiveFloat, StringConstraints

from roll.algorithms.algorithm import AlgorithmSettings
from roll.algorithms.registry import make_algorithm, settings_of
from roll.config.chosen import ChosenByName
from roll.config.family_name import FamilyName
from roll.config.loop import LoopSettings
from roll.config.model import ModelConfig
from roll.config.paths import PathSetting
from roll.config.problems import Check, ConfigError, Problem
from roll.config.ray_cluster import RaySettings
from roll.config.roles import (
    ModelRoleSettings,
    ReferenceSettings,
    RewardSettings,
    RolloutSettings,
    TrainRoleSettings,
)
from roll.config.settings import Seed
from roll.config.sft import SFTConfig
from roll.config.strategy import DType, Head, StrategySettings
from roll.config.task import TaskSettings
from roll.pipelines.rl_checks import rl_checks

ModelRole = Literal["actor", "critic", "reference"]
MODEL_ROLES: tuple[ModelRole, ...] = get_args(ModelRole)


class RLConfig(LoopSettings):
    """A whole run. What it derives for each role: `config.strategy_settings("actor", model_path)`."""

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
    """Name of the run, and of its folder under `output_dir`."""
    output_dir: PathSetting = Path("runs")
    """Folder that holds the folders of runs, seen from the working directory;
    `~` is the home folder, as in every path."""
    seed: Seed = 0
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
    algorithm: Annotated[AlgorithmSettings, ChosenByName(settings_of)]
    """The algorithm, by its name, and its own settings; a role that it alone has is a section here."""
    actor: TrainRoleSettings
    """The policy."""
    reference: ReferenceSettings = ReferenceSettings()
    """The frozen policy that an algorithm's KL compares with."""
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
        return rl_checks(self)

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

    @property
    def model_roles(self) -> tuple[ModelRole, ...]:
        """The actor, and the model roles that the algorithm needs; no other is started."""
        needed = {"actor", *make_algorithm(self.algorithm).roles}
        return tuple(role for role in MODEL_ROLES if role in needed)

    def path_of(self, role: str) -> str:
        """The place of a role's settings: a section here, or one of the algorithm."""
        return role if role in RLConfig.model_fields else f"algorithm.{role}"

    def model_role(self, role: str) -> ModelRoleSettings:
        """Settings of a role. Raises ConfigError if the algorithm has no section for one that is not here."""
        if role in RLConfig.model_fields:
            settings = getattr(self, role)
        elif role in type(self.algorithm).model_fields:
            settings = getattr(self.algorithm, role)
        else:
            settings = None
        if not isinstance(settings, ModelRoleSettings):
            message = f"{self.algorithm.name} needs this role, and has no section of settings for it"
            raise ConfigError([Problem(self.path_of(role), message)])
        return settings

    def strategy_settings(self, role: ModelRole, model_path: Path) -> StrategySettings:
        """Settings that the strategy of `role` is built from.

        Args:
            model_path: folder of the model: `model_path`, or the one that the warm start made.
        """
        common: dict[str, Any] = {"model_path": model_path, "family": self.folder_family}
        common |= {"dtype": self.dtype, "seed": self.seed, "temperature": self.temperature}
        settings = self.model_role(role)
        common |= {"parallel": settings.parallel, "micro_batch": settings.micro_batch}
        common |= {"name": settings.strategy, "batch_timeout_s": self.batch_timeout_s}
        if isinstance(settings, TrainRoleSettings):
            common |= {"optimizer": settings.optimizer}
        head: Head = "value" if role == "critic" else "lm"
        return StrategySettings(head=head, **common)
