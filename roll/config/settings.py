"""The base of all settings: frozen, strict about types and names, and able to check fields against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from roll.config.problems import Check, ConfigError, Problem, UnavailableError, run_checks


class Settings(BaseModel):
    """A section of settings. Bounds of one field stand in its type; what two fields must agree on is a check.

    Types are strict: `"3"`, `3.0` and `true` are no integers. What YAML has no type for is marked `Strict(False)`:
    paths (from text) and tuples (from lists). The sentence under a field is its description.
    Constructing a section by hand raises pydantic's ValidationError, a ValueError; `load_config` raises ConfigError.
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

    if not TYPE_CHECKING:  # a declared __getattr__ would make every name an attribute to a type checker

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise UnavailableError(f"{type(self).__name__}.{name} is not usable")
            return super().__getattr__(name)


S = TypeVar("S", bound=Settings)


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
        section = section_type(field)
        if name not in data:
            if not field.is_required():
                values[name] = field.get_default(call_default_factory=True, validated_data=values)
        elif section is not None and isinstance(data[name], Mapping):
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


def section_type(field: FieldInfo) -> type[Settings] | None:
    """The Settings class of a field that is a section (or an optional one), None for a plain value."""
    for option in (field.annotation, *get_args(field.annotation)):
        if isinstance(option, type) and issubclass(option, Settings):
            return option
    return None


@cache
def _alone(cls: type[Settings], name: str) -> type[BaseModel]:
    """A model with one field of `cls` and none of its checks."""
    field = cls.model_fields[name]
    definition: dict[str, Any] = {name: (field.annotation, field)}
    config = ConfigDict(strict=True, allow_inf_nan=False)
    model: type[BaseModel] = create_model(f"{cls.__name__}_{name}", __config__=config, **definition)
    return model
