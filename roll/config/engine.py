"""The settings that name an engine."""

from __future__ import annotations

from importlib import import_module

from roll.config.settings import Settings


class EngineSettings(Settings):
    """Settings that every engine has. An engine with settings of its own derives from this class."""

    name: str
    """A file of `roll/generation`, or `module:Name` of a `Generator` of the user's own."""


def engine_settings(name: str) -> type[EngineSettings]:
    """The class of settings of the engine called `name`. Raises UserError if there is no such engine."""
    # By its name, and only now: engines lie above the settings, and load torch.
    found: type[EngineSettings] = import_module("roll.generation.registry").find_engine(name).settings_type
    return found


DEFAULT_ENGINE = "transformers"


def default_engine() -> EngineSettings:
    """The engine of runs that name none."""
    return engine_settings(DEFAULT_ENGINE)(name=DEFAULT_ENGINE)
