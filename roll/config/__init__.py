"""Typed settings: pydantic models, YAML files with dotted overrides, and every check that needs no process.

Importing this package loads neither torch nor Ray.
"""

from roll.config.chosen import ChosenByName
from roll.config.engine import EngineSettings
from roll.config.load import dump_config, load_config
from roll.config.loop import LoopSettings
from roll.config.micro_batch import MicroBatchSettings
from roll.config.model import ModelConfig
from roll.config.model_parallel import check_parallel
from roll.config.model_source import ModelSource
from roll.config.optimizer import OptimizerSettings
from roll.config.parallel import Mode, ParallelSettings
from roll.config.paths import expand_path
from roll.config.problems import ConfigError, Problem
from roll.config.ray_cluster import Delivery, RaySettings
from roll.config.roles import (
    ReferenceSettings,
    RewardSettings,
    RolloutSettings,
    TrainRoleSettings,
)
from roll.config.rope import RopeScaling
from roll.config.settings import Settings
from roll.config.sft import RampUpSettings, SFTConfig
from roll.config.sft_data import SFTDataSettings
from roll.config.strategy import DType, Head, StrategyName, StrategySettings
from roll.config.task import PromptForm, TaskSettings

__all__ = [
    "ChosenByName",
    "ConfigError",
    "DType",
    "Delivery",
    "EngineSettings",
    "Head",
    "LoopSettings",
    "MicroBatchSettings",
    "Mode",
    "ModelConfig",
    "ModelSource",
    "OptimizerSettings",
    "ParallelSettings",
    "Problem",
    "PromptForm",
    "RampUpSettings",
    "RaySettings",
    "ReferenceSettings",
    "RewardSettings",
    "RolloutSettings",
    "RopeScaling",
    "SFTConfig",
    "SFTDataSettings",
    "Settings",
    "StrategyName",
    "StrategySettings",
    "TaskSettings",
    "TrainRoleSettings",
    "check_parallel",
    "dump_config",
    "expand_path",
    "load_config",
]
