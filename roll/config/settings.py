"""The base of all settings: frozen, strict about types and names, and able to check fields against each other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Never, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic._internal._model_construction import ModelMetaclass  # BaseModel's; it has no public name.

from roll.config.explain import schema_problems, section_type
from roll.config.problems import Check, ConfigError, Problem, UnavailableError, run_checks


class _RefusesInOurWords(ModelMetaclass):
    """Turns pydantic's refusal of `cls(...)` into a ConfigError.

    Here and not in `__init__`, which pydantic would then call for each section of a whole, one problem at a time.
    """

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise ConfigError(problems_of(cast("type[Settings]", cls), values, error)) from None


class Settings(BaseModel, metaclass=_RefusesInOurWords):
    """A section of settings. Bounds of one field stand in its type; what two fields must agree on is a check.

    Types are strict: `"3"`, `3.0` and `true` are no integers. What YAML has no type for is marked `Strict(False)`:
    paths (from text) and tuples (from lists). The sentence under a field is its description.
    Wrong values raise ConfigError, a ValueError with a line for each problem, from `load_config` and by hand alike.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in a free dict; by default dumping would turn them into null
        use_attribute_docstrings=True,
    )

    def checks(self) -> Iterable[Check]:
        """The checks between this section's fields. Paths of their problems are relative to this section."""
        return ()

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        problems = run_checks(self.checks())
        if problems:
            raise ConfigError(problems)
        return self

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """The settings that a mapping holds. Raises ConfigError."""
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            raise ConfigError(problems_of(cls, obj, error)) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **how: Any) -> Self:
        """The settings that a JSON object holds. Raises ConfigError."""
        try:
            return super().model_validate_json(json_data, **how)
        except ValidationError as error:
            is_json = all(details["type"] != "json_invalid" for details in error.errors(include_url=False))
            raise ConfigError(problems_of(cls, json.loads(json_data) if is_json else None, error)) from None

    def __setattr__(self, name: str, value: Any) -> Never:
        """Refuse: what was checked together stays together."""
        message = f"is not changed by assignment; build another {type(self).__name__} with {name}={value!r}"
        raise ConfigError([Problem(name, message)])

    def __delattr__(self, name: str) -> Never:
        raise ConfigError([Problem(name, f"is not deleted from a {type(self).__name__}, which has all its settings")])

    if not TYPE_CHECKING:  # a declared __getattr__ would make every name an attribute to a type checker

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnavailableError(f"{type(self).__name__}.{name} is not usable")
            return super().__getattr__(name)


Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""A seed. torch takes seeds below 2**64, and those of steps and rows are made from it by multiples of large numbers."""

S = TypeVar("S", bound=Settings)


def problems_of(cls: type[Settings], data: Any, error: ValidationError) -> list[Problem]:
    """Everything that is wrong with `data` as a `cls`: what pydantic found, and what the checks of the rest find."""
    found = schema_problems(cls, error, data)
    return found + find_problems(usable_part(cls, data)) if isinstance(data, Mapping) else found


def find_problems(settings: Settings) -> list[Problem]:
    """The problems that the checks of `settings` and of every section in it find, with paths from `settings` on."""
    found = run_checks(settings.checks())
    for name in type(settings).model_fields:
        section = settings.__dict__.get(name)
        if isinstance(section, Settings):
            found.extend(problem.under(name) for problem in find_problems(section))
    return found


def usable_part(cls: type[S], data: Mapping[str, Any]) -> S:
    """A `cls` that has only those fields of `data` that are right in themselves.

    Reading one of the others raises UnavailableError, so checks on what is usable can run, and only those that
    would need an unusable field are skipped. For reporting problems only: never hand the result to anyone.
    """
    values: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        section = section_type(field, data.get(name))
        if name not in data:
            if not field.is_required():
                values[name] = field.get_default(call_default_factory=True, validated_data=values)
        elif section is not None and issubclass(section, Settings) and isinstance(data[name], Mapping):
            values[name] = usable_part(section, data[name])
        else:
            try:
                values[name] = getattr(_alone(cls, name).model_validate({name: data[name]}), name)
            except ValidationError:
                continue
    part = cast(S, cls.model_construct(**values))  # pydantic's mypy plugin sees the base class
    for name in cls.model_fields.keys() - values.keys():
        part.__dict__.pop(name, None)  # model_construct fills in defaults, which are not what the user asked for
    return part


@cache
def _alone(cls: type[Settings], name: str) -> type[BaseModel]:
    """A model with one field of `cls` and none of its checks."""
    field = cls.model_fields[name]
    definition: dict[str, Any] = {name: (field.annotation, field)}
    config = ConfigDict(strict=True, allow_inf_nan=False)
    model: type[BaseModel] = create_model(f"{cls.__name__}_{name}", __config__=config, **definition)
    return model
