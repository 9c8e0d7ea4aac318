"""A section of settings whose class is chosen by its own `name`.

    algorithm: Annotated[AlgorithmSettings, ChosenByName(settings_of_algorithm)]

    algorithm: {name: ppo, clip_low: 0.1}                          # PPOSettings
    algorithm: {name: "my_package.losses:MyAlgorithm", beta: 0.3}  # the settings of a user's own class

The section is read, checked, dumped and read back as the class that its name stands for, with all of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticKnownError, core_schema

from roll.errors import UserError

NAME = "name"
"""The setting that chooses."""


@dataclass(frozen=True)
class ChosenByName:
    """Marks a field, in `Annotated`, as a section whose class `find` chooses."""

    find: Callable[[str], type[BaseModel]]
    """The class of settings that a name stands for. Raises UserError for a name that stands for none."""
    default: str | None = None
    """Name of a section that gives none; None: it must give one."""

    def section_of(self, value: object) -> type[BaseModel] | None:
        """The class for `value`, a mapping, settings, or None where none are given; None where no name chooses one."""
        if isinstance(value, BaseModel):
            return type(value)
        name = value.get(NAME, self.default) if isinstance(value, Mapping) else self.default
        try:
            return self.find(name) if isinstance(name, str) else None
        except UserError:
            return None

    def __get_pydantic_core_schema__(self, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        def chosen(value: object) -> object:
            if isinstance(value, source):
                return self._under_its_name(value, source)
            if not isinstance(value, Mapping):
                raise PydanticKnownError("model_type", {"class_name": source.__name__})
            section = self._class_of(value, source)
            # The errors that it raises are those of the outer section, with paths that lead through this one.
            return section.__pydantic_validator__.validate_python({NAME: self.default, **value})

        dumped = core_schema.simple_ser_schema("any")  # As its own class, not as the one that the field is declared as.
        return core_schema.no_info_plain_validator_function(chosen, serialization=dumped)

    def _under_its_name(self, settings: BaseModel, source: type[BaseModel]) -> BaseModel:
        """Settings made by hand, unless their name stands for another class."""
        name = getattr(settings, NAME)
        section = self._class_of({NAME: name}, source)
        if not isinstance(settings, section):
            text = f"{name!r} has settings of class {section.__name__}, not {type(settings).__name__}"
            raise _wrong_name(source, name, UserError(text))
        return settings

    def _class_of(self, value: Mapping[Any, Any], source: type[BaseModel]) -> type[BaseModel]:
        name = value.get(NAME, self.default)
        if not isinstance(name, str):
            kind = "string_type" if NAME in value else "missing"
            raise _wrong(source, InitErrorDetails(type=kind, loc=(NAME,), input=value.get(NAME, value)))
        try:
            return self.find(name)
        except UserError as error:
            raise _wrong_name(source, name, error) from error


def _wrong_name(source: type[BaseModel], name: str, error: UserError) -> ValidationError:
    return _wrong(source, InitErrorDetails(type="value_error", loc=(NAME,), input=name, ctx={"error": error}))


def _wrong(source: type[BaseModel], details: InitErrorDetails) -> ValidationError:
    return ValidationError.from_exception_data(source.__name__, [details])
