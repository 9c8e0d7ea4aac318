"""Strategies: a model, how it is held, and what RL needs of it. No Ray is needed here.

A strategy is imported when it is asked for: a process that generates with transformers needs no Megatron-Core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roll.strategies.base import InferenceStrategy, Metrics, TrainStrategy
from roll.strategies.output import ForwardFunc, LossFunc, ModelOutput

if TYPE_CHECKING:
    from roll.strategies.hf import HfStrategy
    from roll.strategies.megatron_infer import MegatronInferStrategy
    from roll.strategies.megatron_train import MegatronTrainStrategy

__all__ = [
    "ForwardFunc",
    "HfStrategy",
    "InferenceStrategy",
    "LossFunc",
    "MegatronInferStrategy",
    "MegatronTrainStrategy",
    "Metrics",
    "ModelOutput",
    "TrainStrategy",
]

_MODULE_OF = {
    "HfStrategy": "hf",
    "MegatronInferStrategy": "megatron_infer",
    "MegatronTrainStrategy": "megatron_train",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from roll.platform import get_platform

    with get_platform().quiet_megatron():
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
