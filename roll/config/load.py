"""From a YAML file and dotted overrides to validated settings, and back.

Every problem is reported at once: what cannot be read, unknown and wrong settings, and settings that do not agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.config.paths import expand_path
from roll.config.problems import ConfigError, Problem
from roll.config.settings import Settings

S = TypeVar("S", bound=Settings)

EXTENDS = "extends"


def load_config(cls: type[S], path: Path | str, overrides: Sequence[str] = ()) -> S:
    """Read `path`, apply `overrides` in order, resolve interpolations and validate the whole as a `cls`.

    A file, or a section in it, may name another file to start from, seen from its own folder, and then holds only what
    differs:

        extends: ppo_cpu.yaml
        actor: {parallel: {tp: 1, pp: 2}}
        warm_start: {extends: sft_cpu.yaml, steps: 300}

    Sections are merged key by key; lists and values are replaced. Interpolations are seen from the whole config, in a
    section's file too, so `${.name}` reaches its neighbours there.

    Args:
        cls: the class of the whole config.
        path: a YAML file; OmegaConf's interpolations (`${steps}`, `${oc.env:HOME}`) may be used. In paths `~` is
            the home folder, and `$HOME` is not replaced.
        overrides: `dotted.path=value`, where the value is YAML: `actor.parallel.tp=2`, `algorithm.value_clip=null`,
            `actor.optimizer.betas=[0.9,0.99]`, `model={path: some/folder, config: null}`.

    Raises:
        ConfigError: a ValueError with one line per problem, `dotted.path: message`.
    """
    problems: list[Problem] = []
    tree = _apply_overrides(_read(_expanded(path)), overrides, problems)
    data = _resolve(tree, "", problems)
    unresolved = {problem.path for problem in problems}
    try:
        settings = cls.model_validate(data)
    except ConfigError as error:
        problems.extend(problem for problem in error.problems if problem.path not in unresolved)
    if problems:
        raise ConfigError(problems)
    return settings


def dump_config(settings: Settings) -> str:
    """`settings` as YAML, complete and resolved, which `load_config` reads back to an equal object."""
    data = _escape(settings.model_dump(mode="json"))
    return OmegaConf.to_yaml(OmegaConf.create(data))


def _escape(value: Any) -> Any:
    """Mark every `${` as text, with the backslashes before it doubled, as OmegaConf reads them."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def _expanded(path: Path | str) -> Path:
    try:
        return expand_path(path)
    except ValueError as error:
        raise ConfigError([Problem(str(path), str(error))]) from error


def _read(path: Path, extending: tuple[Path, ...] = ()) -> DictConfig:
    """The tree of `path`, laid over the one that it extends. `extending` are the files that led here."""
    if path.resolve() in [other.resolve() for other in extending]:
        chain = " -> ".join(str(other) for other in (*extending, path))
        raise ConfigError([Problem(str(path), f"extends itself: {chain}")])
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError as error:
        by = f", which {extending[-1]} extends" if extending else ""
        raise ConfigError([Problem(str(path), f"there is no such config file{by}")]) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {_one_line(error)}")]) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError([Problem(str(path), "must hold a mapping of settings, got a list")])
    return _extended(tree, path, (*extending, path))


def _extended(section: DictConfig, path: Path, extending: tuple[Path, ...]) -> DictConfig:
    """A section of `path` with every `extends` in it replaced by what it names."""
    try:
        base = section.pop(EXTENDS, None)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {_one_line(error)}")]) from error
    for key in list(section):
        if OmegaConf.is_interpolation(section, key) or OmegaConf.is_missing(section, key):
            continue
        if isinstance(section[key], DictConfig):
            section[key] = _extended(section[key], path, extending)
    if base is None:
        return section
    if not isinstance(base, str):
        raise ConfigError([Problem(f"{path}: {EXTENDS}", f"must be the name of a file, got {base!r}")])
    merged = OmegaConf.merge(_read(path.parent / _expanded(base), extending), section)
    assert isinstance(merged, DictConfig)
    return merged


def _apply_overrides(tree: DictConfig, overrides: Iterable[str], problems: list[Problem]) -> DictConfig:
    for override in overrides:
        name, equals, _ = override.partition("=")
        if not (equals and all(name.split("."))):
            problems.append(Problem(f"override {override!r}", "must be dotted.path=value"))
            continue
        try:
            merged = OmegaConf.merge(tree, OmegaConf.from_dotlist([override]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(Problem(f"override {override!r}", f"cannot be read: {_one_line(error)}"))
            continue
        assert isinstance(merged, DictConfig)
        tree = merged
    return tree


class _Unresolved:
    """Stands where a value could not be resolved: it fits no type, so nothing is compared with it."""


def _resolve(node: DictConfig | ListConfig, path: str, problems: list[Problem]) -> Any:
    """`node` in plain dicts and lists, with each interpolation replaced by what it stands for."""
    keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
    values = {key: _resolve_item(node, key, f"{path}.{key}" if path else str(key), problems) for key in keys}
    return list(values.values()) if isinstance(node, ListConfig) else values


def _resolve_item(node: DictConfig | ListConfig, key: Any, path: str, problems: list[Problem]) -> Any:
    try:
        value = node[key]
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere, or the missing value `???`
        problems.append(Problem(path, str(error).splitlines()[0]))
        return _Unresolved()
    return _resolve(value, path, problems) if isinstance(value, DictConfig | ListConfig) else value


def _one_line(error: Exception) -> str:
    """The message in one line, without the type that OmegaConf adds."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("object_type="))
