"""End tokens that a model folder names."""

from __future__ import annotations

import json
from pathlib import Path

from roll.config.hf_config import stated_token_ids
from roll.config.problems import ConfigError, Problem


def end_token_ids_in(folder: Path, config_key: str = "eos_token_id") -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json and of config.json in `folder`, each id once; a file may be missing.

    Args:
        config_key: what config.json of the model's family calls it.

    An id of -1 is how older files write that there is none.

    Raises ConfigError naming the file for one that is no JSON object, or whose end tokens are neither an id nor a
    list of ids.
    """
    found: dict[int, None] = {}
    for file, key in ((folder / "generation_config.json", "eos_token_id"), (folder / "config.json", config_key)):
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError([Problem(str(file), f"cannot be read: {error}")]) from error
        named = content.get(key) if isinstance(content, dict) else content
        stated = stated_token_ids(named)
        ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
        if not isinstance(content, dict) or any(type(one) is not int or one < 0 for one in ids):
            raise ConfigError([Problem(str(file), f"{key} must be an id or a list of ids, got {named!r}")])
        found |= dict.fromkeys(ids)
    return tuple(found)
