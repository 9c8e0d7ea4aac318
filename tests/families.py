"""The families that tests run over: all of the package, and one that lies outside of it."""

from __future__ import annotations

from typing import Any

from roll.config import ModelConfig
from roll.families import FAMILIES, find_family

OUTSIDE = "tests.outside.boxes:BOXES"
NAMES = [*sorted(FAMILIES), OUTSIDE]
LISTED = ", ".join(repr(name) for name in NAMES[:-2]) + f" and {NAMES[-2]!r}"
"""The families of the package, as messages list them."""
HAVING_BIAS = [name for name in NAMES if find_family(name).key("bias") is not None]


def tiny(name: str, **changes: Any) -> ModelConfig:
    """The small model that a family declares, with some fields changed."""
    return ModelConfig(**{**find_family(name).tiny, "model_type": name, **changes})


def variants() -> dict[str, ModelConfig]:
    """Two models of each family: with every bias it can have, and tied with dynamic RoPE where it has that.

    Rows of test batches have up to 12 tokens, more than the 7 that dynamic RoPE was trained for.
    """
    models = {}
    for name in NAMES:
        stretched = "dynamic" in find_family(name).rope_types
        rope = {"max_position_embeddings": 7, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
        models[f"{name}-biased"] = tiny(name, bias=name in HAVING_BIAS)
        models[f"{name}-tied"] = tiny(name, tie_word_embeddings=True, **(rope if stretched else {}))
    return models


def family_setting(name: str) -> str | None:
    """What settings say beside a model folder of this family: null for one of the package."""
    return None if name in FAMILIES else name
