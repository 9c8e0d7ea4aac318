"""What a supervised run's final model depends on, and how two runs differ in that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll.config import SFTConfig

NOT_OF_THE_MODEL = frozenset({"name", "output_dir", "eval_every", "save_every", "resume", "process_group_timeout_s"})
"""Settings that the final model does not depend on. `model.trust_remote_code` is another: it only lets a run begin."""


def shaping_settings(config: SFTConfig) -> dict[str, Any]:
    """All others, as JSON has them. Of files they hold the names, not what is in them."""
    excluded: dict[str, Any] = dict.fromkeys(NOT_OF_THE_MODEL, True)
    excluded |= {"data": {"cache_dir"}, "model": {"trust_remote_code"}}
    return config.model_dump(mode="json", exclude=excluded)


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Each setting that differs, with its values there and here."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in dict.fromkeys([*theirs, *ours]):
            yield from differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else name)
    elif theirs != ours:
        yield f"{path} {theirs!r} there, {ours!r} here"
