"""Where a run's model comes from, and the checks of that alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from roll.config.model import ModelConfig
from roll.config.problems import Check, ConfigError, Problem, UnavailableError
from roll.config.settings import Settings
from roll.config.strategy import FolderPath


class ModelSource(Settings):
    """Where the model comes from: a folder, or nothing but an architecture. Exactly one is set."""

    path: FolderPath | None = None
    """Folder in Hugging Face layout with weights and tokenizer, seen from the working directory."""
    config: ModelConfig | None = None
    """Architecture of a model that is made from random weights, with a tokenizer of its own, one token a character."""

    @property
    def architecture(self) -> ModelConfig:
        """The architecture, from `config` or from config.json in `path`. Raises ConfigError if that is unusable."""
        if self.config is not None:
            return self.config
        assert self.path is not None, "exactly one of path and config is set"
        return ModelConfig.from_folder(self.path)

    def checks(self) -> Iterable[Check]:
        return (self._exactly_one,)

    def _exactly_one(self) -> Iterator[Problem]:
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else f"path {str(self.path)!r} and a config"
            yield Problem("", f"exactly one of path and config must be set, the other null; got {given}")


def folder_problems(model: ModelSource) -> Iterator[Problem]:
    """What is wrong with the config.json of `model.path`."""
    if model.path is None or model.config is not None:
        return
    try:
        ModelConfig.from_folder(model.path)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem("model.path", str(problem))


def architecture_of(model: ModelSource) -> ModelConfig:
    """The architecture, for checks. Raises UnavailableError where `folder_problems` or the section's own check says why
    there is none.
    """
    if model.path is None and model.config is None:
        raise UnavailableError("there is no model")
    try:
        return model.architecture
    except ConfigError as error:
        raise UnavailableError("the model folder is not usable") from error
