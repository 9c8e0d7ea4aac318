"""How tests name the parallel layouts they run under."""

from __future__ import annotations

from typing import Any


def name_of(value: Any) -> str:
    """For pytest's `ids`: `tp-2-pp-2` for a layout, the value itself for anything else."""
    return "-".join(f"{key}-{number}" for key, number in value.items()) if isinstance(value, dict) else str(value)
