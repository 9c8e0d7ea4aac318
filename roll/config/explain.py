"""Pydantic's errors in the words of a config: dotted paths, the value that was given, the nearest known setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from roll.config.chosen import ChosenByName
from roll.config.problems import ConfigError, Problem

LONGEST_VALUE = 80


def schema_problems(cls: type[BaseModel], error: ValidationError, data: Any = None) -> list[Problem]:
    """One problem per field that is wrong in itself. What the checks of a section found is left to `find_problems`.

    Args:
        data: what was given as a `cls`; its names choose the classes of sections.
    """
    return [problem for details in error.errors(include_url=False) for problem in _explain(cls, details, data)]


def _explain(cls: type[BaseModel], details: ErrorDetails, data: Any) -> Iterator[Problem]:
    path = ".".join(str(part) for part in details["loc"])
    got = f"got {_shown(details['input'])}"
    cause = details.get("ctx", {}).get("error")
    match details["type"]:
        case "value_error" if isinstance(cause, ConfigError):
            pass  # the checks of a section
        case "default_factory_not_called":
            pass  # a default that follows from a field with a problem of its own
        case "value_error":
            yield Problem(path, f"{cause}, {got}")
        case "json_invalid":
            yield Problem(path, details["msg"])
        case "missing":
            yield Problem(path, "this setting is required, but not given")
        case "extra_forbidden":
            yield Problem(path, f"unknown setting; did you mean {nearest_setting(cls, path, data)}?")
        case "path_type":
            yield Problem(path, f"must be a path, {got}")
        case "model_type":
            yield Problem(path, f"must be a section of settings, {got}")
        case _:
            message = details["msg"].replace("Input should", "must")
            yield Problem(path, f"{message}, {got}")


def _shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def nearest_setting(cls: type[BaseModel], path: str, data: Any = None) -> str:
    """The known setting that `path` most likely meant.

    In this order: a similar name in the same section (`actor.parallel.tpp` is `actor.parallel.tp`), the same name in
    another section (`actor.lr` is `actor.optimizer.lr`), the most similar path of all.
    """
    known = known_settings(cls, data)
    section, _, name = path.rpartition(".")
    siblings = {_name(other): other for other in known if other.rpartition(".")[0] == section}
    if similar := get_close_matches(name, siblings, n=1):
        return siblings[similar[0]]
    namesakes = [other for other in known if _name(other) == name]
    others = [other for other in known if not path.startswith(f"{other}.")]  # The section itself is no answer.
    return get_close_matches(path, namesakes or others or known, n=1, cutoff=0.0)[0]


def known_settings(cls: type[BaseModel], data: Any = None) -> list[str]:
    """The dotted paths of all settings under `cls`, sections included, in the order of their definition.

    Args:
        data: what was given as a `cls`; its names choose the classes of sections.
    """
    known = []
    for name, field in cls.model_fields.items():
        known.append(name)
        value = data.get(name) if isinstance(data, Mapping) else None
        section = section_type(field, value)
        if section is not None:
            known.extend(f"{name}.{below}" for below in known_settings(section, value))
    return known


def section_type(field: FieldInfo, value: object = None) -> type[BaseModel] | None:
    """The class of a field that is a section of settings (or an optional one), None for a plain value.

    A section that is chosen by its name has the class that `value` chooses, and None where it chooses none.
    """
    for mark in field.metadata:
        if isinstance(mark, ChosenByName):
            return mark.section_of(value)
    for option in (field.annotation, *get_args(field.annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _name(path: str) -> str:
    return path.rpartition(".")[2]
