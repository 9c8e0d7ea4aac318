"""Source of a run's model, and the checks of that alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from roll.config.family_name import FamilyName
from roll.config.model import ModelConfig
from roll.config.paths import PathSetting
from roll.config.problems import Check, ConfigError, Problem, UnavailableError
from roll.config.settings import Settings
from roll.families import FAMILIES


class ModelSource(Settings):
    """Source of the model: a folder, or nothing but an architecture. Exactly one is set."""

    path: PathSetting | None = None
    """Folder in Hugging Face layout with weights and tokenizer, seen from the working directory."""
    family: FamilyName | None = None
    """Family of the model in `path`, one of your own as module:Name; null: the one whose model_type its config.json
    has."""
    trust_remote_code: bool = False
    """Whether code that lies in `path`, or that it names, may run: the tokenizer's, where there is no tokenizer.json.
    Models are always this library's own."""
    config: ModelConfig | None = None
    """Architecture of a model that is made from random weights, with a tokenizer of its own, one token a character."""

    @property
    def architecture(self) -> ModelConfig:
        """The architecture, from `config` or from config.json in `path`. Raises ConfigError if that is unusable."""
        if self.config is not None:
            return self.config
        assert self.path is not None, "exactly one of path and config is set"
        return ModelConfig.from_folder(self.path, self.family)

    @property
    def folder_family(self) -> str | None:
        """Name of the family for a folder that holds this model; None: the one that its config.json names."""
        name = self.family if self.config is None else self.config.model_type
        return None if name in FAMILIES else name

    def checks(self) -> Iterable[Check]:
        return (self._exactly_one, self._code_is_of_a_folder, self._family_is_of_a_folder)

    def _exactly_one(self) -> Iterator[Problem]:
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else f"path {str(self.path)!r} and a config"
            yield Problem("", f"exactly one of path and config must be set, the other null; got {given}")

    def _code_is_of_a_folder(self) -> Iterator[Problem]:
        if self.trust_remote_code and self.path is None:
            yield Problem("trust_remote_code", "must be false where there is no path: there is no code to run")

    def _family_is_of_a_folder(self) -> Iterator[Problem]:
        if self.family is not None and self.path is None:
            yield Problem(
                "family", f"must be null where there is no path, got {self.family!r}; config.model_type names it"
            )


def folder_problems(setting: str, folder: Path, family: str | None) -> Iterator[Problem]:
    """Problems of the config.json of a model folder, which `setting` names."""
    try:
        ModelConfig.from_folder(folder, family)
    except ConfigError as error:
        for problem in error.problems:
            yield Problem(setting, str(problem))


def architecture_of(model: ModelSource) -> ModelConfig:
    """The architecture, for checks. Raises UnavailableError where `folder_problems` or the section's own check says why
    there is none.
    """
    if model.config is not None:
        return model.config
    if model.path is None:
        raise UnavailableError("there is no model")
    return architecture_in(model.path, model.family)


def architecture_in(folder: Path, family: str | None) -> ModelConfig:
    """The architecture of a model folder, likewise."""
    try:
        return ModelConfig.from_folder(folder, family)
    except ConfigError as error:
        raise UnavailableError("the model folder is not usable") from error
