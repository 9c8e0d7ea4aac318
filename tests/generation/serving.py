"""Engines of tiny models whose weights come from the one-process strategy, and updates for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.config import ModelConfig
from roll.generation.generator import ServedModel
from roll.generation.records import Request, Sampling
from roll.generation.transformers import TransformersGenerator, TransformersSettings
from roll.generation.weights import Bucket
from roll.models.family_tensors import family_shapes
from roll.strategies import HfStrategy
from tests.strategies.tiny import settings

MAX_TOKENS = 28


def served(folder: Path, max_tokens: int = MAX_TOKENS) -> ServedModel:
    vocab_size = ModelConfig.from_folder(folder).vocab_size
    return ServedModel(folder, None, "float32", max_tokens=max_tokens, pad_token_id=0, vocab_size=vocab_size)


def model_of(folder: Path, seed: int = 7) -> HfStrategy:
    """A model with weights drawn from `seed`."""
    model = HfStrategy(settings(folder, "hf", optimizer=None, seed=seed))
    model.initialize()
    return model


def buckets_of(model: HfStrategy, version: int, bucket_bytes: int = 20_000) -> Iterator[Bucket]:
    for index, tensors in enumerate(model.model_update(bucket_bytes)):
        yield Bucket.of(version, index, tensors)


def update(engine: TransformersGenerator, model: HfStrategy, version: int) -> None:
    shapes = family_shapes(model.model_config, "lm")
    engine.take_weights(version, shapes, buckets_of(model, version))


def engine_of(model: HfStrategy, max_tokens: int = MAX_TOKENS, **changes: Any) -> TransformersGenerator:
    """An engine with the weights of `model`, as version 1."""
    engine = TransformersGenerator(TransformersSettings(**changes), served(model.settings.model_path, max_tokens))
    engine.start()
    update(engine, model, version=1)
    return engine


def requests(
    prompts: list[list[int]],
    *,
    temperature: float | None = 1.0,
    ends: tuple[int, ...] = (2, 5),
    length: int = 20,
    seed: int = 0,
) -> list[Request]:
    """One request for each prompt; seeds count up from `seed`."""
    sampling = Sampling(length, temperature, ends)
    return [Request(row, tuple(prompt), sampling, seed + row) for row, prompt in enumerate(prompts)]
