"""The setting that names a model family."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from roll.families import find_family


def _of_a_family(name: str) -> str:
    find_family(name)
    return name


FamilyName = Annotated[str, AfterValidator(_of_a_family)]
"""A model_type that this library has, or `module:Name` of a `Family` of the user's own."""
