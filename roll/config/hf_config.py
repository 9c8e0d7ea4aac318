"""Reads config.json of a Hugging Face folder: what it leaves out, what it asks for that this library does not have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.problems import ConfigError, Problem
from roll.config.rope import RopeScaling
from roll.families import FAMILIES, Family, find_family

# Of every family: changes what the model computes, with the only value that is supported. Not written by `to_hf_dict`.
ONLY_EVERYWHERE: dict[str, Any] = {"partial_rotary_factor": 1.0, "quantization_config": None}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_TOKEN = -1
FRACTIONS = ("rms_norm_eps", "rope_theta", "initializer_range")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_config_json(folder: Path) -> dict[str, Any]:
    """The content of `folder`/config.json.

    Raises:
        ConfigError: there is no such folder or file, or it holds no JSON object.
    """
    file = folder / "config.json"
    if not folder.is_dir():
        raise ConfigError([Problem(str(folder), "there is no such model folder")])
    if not file.is_file():
        raise ConfigError([Problem(str(folder), "the model folder has no config.json")])
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ConfigError([Problem(str(file), f"is not JSON: {error}")]) from error
    if not isinstance(data, dict):
        raise ConfigError([Problem(str(file), f"must hold a JSON object, got {type(data).__name__}")])
    return data


def family_of(data: Mapping[str, Any], name: str | None) -> tuple[str, Family] | Problem:
    """The name and the family of config.json, or what is wrong with its model_type.

    Args:
        name: of the family that the settings name; None: config.json alone names it.
    """
    given = data.get("model_type")
    if name is not None:
        family = find_family(name)
        if given == family.model_type:
            return name, family
        return Problem("model_type", f"family {name!r} has {family.model_type!r}, got {given!r}")
    if isinstance(given, str) and given in FAMILIES:
        return given, FAMILIES[given]
    experts = ", a mixture of experts" if any(data.get(key) for key in EXPERTS) else ""
    known = f"only {_listed(FAMILIES)} are supported, got {given!r}{experts}"
    return Problem("model_type", f"{known}; the setting `family` names one of your own, as module:Name")


def under_field_names(content: Mapping[str, Any], family: Family, fields: Iterable[str]) -> dict[str, Any]:
    """The content of config.json with the names of `ModelConfig`'s fields for the family's keys."""
    fields = tuple(fields)
    named = {name: content[key] for name in fields if (key := family.key(name)) in content and key is not None}
    return {key: value for key, value in content.items() if key not in fields} | named


def under_keys(problem: Problem, family: Family) -> Problem:
    """A problem of one of `ModelConfig`'s fields under the key that the file has."""
    name, dot, rest = problem.path.partition(".")
    return Problem(f"{family.key(name) or name}{dot}{rest}", problem.message)


def unsupported(data: Mapping[str, Any], family: Family) -> Iterator[Problem]:
    """The keys of config.json that ask for a computation this library does not have."""
    for key, only in (ONLY_EVERYWHERE | dict(family.only)).items():
        meaning = data.get(key, family.defaults.get(key, only))
        if meaning is None and only is False:  # A null is as false as a false to every reader.
            continue
        if meaning != only:
            got = json.dumps(meaning) if key in data else f"no value, which means {json.dumps(meaning)}"
            yield Problem(key, f"only {json.dumps(only)} is supported, got {got}")
    architectures = data.get("architectures") or [family.architecture]
    # The network without its output: all that a value head needs, and complete where the output is tied.
    if not {family.architecture, family.base_architecture} & set(architectures):
        yield Problem("architectures", f"only {family.architecture!r} is supported, got {json.dumps(architectures)}")
    others = sorted(set(data.get("layer_types") or ()) - {"full_attention"})
    if others:
        yield Problem("layer_types", f"only 'full_attention' is supported, got {_listed(others)}")
    for key in EXPERTS:
        if data.get(key):
            yield Problem(key, f"mixtures of experts are not supported, got {data[key]}")


def stated_values(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Values of `names` in config.json. A null says no more than a missing key does, but for a token id.

    A token id of -1 is how older files write that there is none. Numbers may be written as text ("1e-06").
    """
    stated = {name: data[name] for name in names if data.get(name) is not None or (name in TOKEN_IDS and name in data)}
    for name, value in stated.items():
        if name in TOKEN_IDS:
            stated[name] = stated_token_ids(value)
        elif name in FRACTIONS:
            stated[name] = _number(value)
    return stated


def stated_token_ids(value: Any) -> Any:
    """A token id or a list of ids without each -1, which is how older files write "none"; None if no id is left."""
    if isinstance(value, list):
        return [token_id for token_id in value if token_id != NO_TOKEN] or None
    return None if value == NO_TOKEN else value


def _number(value: Any) -> Any:
    """The number that a text is; anything else as it is, for the settings' types to judge."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class RopeReading:
    """Base and scaling of RoPE in config.json: as `rope_theta` and `rope_scaling`, or as transformers 5 writes them.

    transformers 5 has one `rope_parameters` with `rope_theta` inside. A `rope_scaling` beside it is preferred, which
    is what transformers does too.
    """

    def __init__(self, data: Mapping[str, Any], family: Family, default_theta: float | None) -> None:
        """
        Args:
            data: config.json under the names of `ModelConfig`'s fields.
            default_theta: base of a config.json that names none; None: that of `ModelConfig`.
        """
        self.key = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
        given = data.get(self.key) or {}
        self.problems: list[Problem] = []
        self.theta = stated_values(data, ["rope_theta"]).get("rope_theta", default_theta)
        self.scaling: dict[str, Any] | None = None
        if not isinstance(given, dict):
            self.problems.append(Problem(self.key, f"must be a JSON object, got {json.dumps(given)}"))
        elif per_layer := [key for key, value in given.items() if isinstance(value, dict)]:
            message = f"must hold for all layers alike, got one for each of {_listed(per_layer)}"
            self.problems.append(Problem(self.key, message))
        else:
            self.theta = stated_values(given, ["rope_theta"]).get("rope_theta", self.theta)
            self._read(given, family)

    def _read(self, given: dict[str, Any], family: Family) -> None:
        name = "rope_type" if "rope_type" in given else "type"
        rope_type = given.get(name, "default")
        known = ("default", *family.rope_types)
        if rope_type not in known:
            message = f"{family.model_type} has only {_listed(known)} here, got {rope_type!r}"
            self.problems.append(Problem(f"{self.key}.{name}", message))
            return
        settings = {
            key: _number(value)
            for key, value in given.items()
            if key not in ("type", "rope_type", "rope_theta") and value is not None
        }
        if settings.get("partial_rotary_factor") == 1:
            del settings["partial_rotary_factor"]
        meaningful = () if rope_type == "default" else RopeScaling.model_fields
        for key in [key for key in settings if key not in meaningful]:
            message = f"is not supported with rope type {rope_type!r}, got {json.dumps(settings[key])}"
            self.problems.append(Problem(f"{self.key}.{key}", message))
        if rope_type != "default":
            self.scaling = {"rope_type": rope_type} | {key: settings[key] for key in meaningful if key in settings}

    @property
    def values(self) -> dict[str, Any]:
        """The two as fields of `ModelConfig`."""
        base = {} if self.theta is None else {"rope_theta": self.theta}
        return base | {"rope_scaling": self.scaling}

    def as_named_in_file(self, problem: Problem) -> Problem:
        """A problem of ModelConfig's `rope_scaling` under the key that the file has."""
        _, is_rope, rest = problem.path.partition("rope_scaling")
        return Problem(self.key + rest, problem.message) if is_rope else problem


def _listed(names: Mapping[str, Any] | list[str] | tuple[str, ...]) -> str:
    """'a', 'b' and 'c'."""
    *first, last = (repr(name) for name in names)
    return f"{', '.join(first)} and {last}" if first else last
