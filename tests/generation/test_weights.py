"""Updates of an engine's weights: taken as a whole, or the engine keeps its weights, or says that it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from roll.errors import UserError
from roll.generation.records import Response
from roll.generation.transformers import TransformersGenerator
from roll.generation.weights import Bucket, Shapes, WrongWeights, checksum
from roll.models.family_tensors import family_shapes
from roll.strategies import HfStrategy
from tests.generation.serving import buckets_of, engine_of, model_of, requests, update
from tests.strategies.tiny import write_tiny

Change = Callable[[list[Bucket]], list[Bucket]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[HfStrategy]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    return [model_of(folder), model_of(folder, seed=8)]


@pytest.fixture
def engine(models: list[HfStrategy]) -> TransformersGenerator:
    return engine_of(models[0])


def answers(engine: TransformersGenerator) -> list[Response]:
    return list(engine.generate(requests([[6, 7, 8], [9]], temperature=None)))


def shapes_of(model: HfStrategy) -> dict[str, tuple[int, ...]]:
    return dict(family_shapes(model.model_config, "lm"))


def test_an_update_replaces_all_weights(models: list[HfStrategy], engine: TransformersGenerator) -> None:
    first = answers(engine)
    assert {response.version for response in first} == {1}
    update(engine, models[1], version=5)
    assert answers(engine) == [replace(response, version=5) for response in answers_of(models[1])]
    assert [one.log_probs for one in answers(engine)] != [one.log_probs for one in first]


def answers_of(model: HfStrategy) -> list[Response]:
    return answers(engine_of(model))


def first_named(buckets: list[Bucket]) -> str:
    return next(iter(buckets[0].tensors))


def resent(bucket: Bucket, **changes: torch.Tensor) -> Bucket:
    """The bucket with some tensors replaced or added, and the checksum of the new content."""
    return Bucket.of(bucket.version, bucket.index, dict(bucket.tensors) | changes)


def corrupted(bucket: Bucket) -> Bucket:
    name, tensor = next(iter(bucket.tensors.items()))
    flipped = tensor.clone()
    flipped.view(-1)[0] += 1e-3
    return replace(bucket, tensors=dict(bucket.tensors) | {name: flipped})


BEFORE_ANYTHING_IS_WRITTEN: dict[str, Change] = {
    "bucket 1 of version 2 came where bucket 0 was due": lambda buckets: buckets[1:],
    "bucket 0 of version 3 came in the update to version 2": lambda buckets: [replace(buckets[0], version=3)],
    "its bytes are not those that were sent": lambda buckets: [corrupted(buckets[0]), *buckets[1:]],
    r"extra was not declared": lambda buckets: [resent(buckets[0], extra=torch.ones(2)), *buckets[1:]],
    r"has shape \(3,\), declared was": lambda buckets: [
        resent(buckets[0], **{first_named(buckets): torch.ones(3)}),
        *buckets[1:],
    ],
    r"has type torch.int8, the engine's is float32": lambda buckets: [
        resent(buckets[0], **{name: tensor.to(torch.int8) for name, tensor in buckets[0].tensors.items()}),
        *buckets[1:],
    ],
    r"version 2 lacks .* and \d+ more": lambda buckets: [],
}
IN_THE_MIDDLE: dict[str, Change] = {
    "bucket 2 of version 2 came where bucket 1 was due": lambda buckets: [buckets[0], *buckets[2:]],
    "version 2 lacks": lambda buckets: buckets[:-1],
    "bucket 1 of version 2: .* came before": lambda buckets: [buckets[0], resent(buckets[1], **buckets[0].tensors)],
    "bucket 1 of version 2: its bytes": lambda buckets: [buckets[0], corrupted(buckets[1])],
}


@pytest.mark.parametrize("message", BEFORE_ANYTHING_IS_WRITTEN)
def test_what_is_wrong_from_the_start_leaves_the_old_weights(
    models: list[HfStrategy], engine: TransformersGenerator, message: str
) -> None:
    before, other = answers(engine), models[1]
    buckets = BEFORE_ANYTHING_IS_WRITTEN[message](list(buckets_of(other, 2)))
    with pytest.raises(WrongWeights, match=message):
        engine.take_weights(2, shapes_of(other), buckets)
    assert answers(engine) == before
    update(engine, other, version=2)  # The refused version may come again.
    assert answers(engine) != before


@pytest.mark.parametrize("message", IN_THE_MIDDLE)
def test_an_update_that_fails_in_the_middle_leaves_none(
    models: list[HfStrategy], engine: TransformersGenerator, message: str
) -> None:
    other = models[1]
    buckets = IN_THE_MIDDLE[message](list(buckets_of(other, 2)))
    with pytest.raises(WrongWeights, match=message):
        engine.take_weights(2, shapes_of(other), buckets)
    with pytest.raises(UserError, match="cannot generate: the update to version 2 did not end"):
        answers(engine)
    update(engine, models[0], version=2)
    assert answers(engine) == [replace(response, version=2) for response in answers_of(models[0])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shapes: shapes.pop("output.weight"), "version 2 do not fit: output.weight is missing$"),
        (lambda shapes: shapes.update(more=(3,)), "version 2 do not fit: more is unknown$"),
        (
            lambda shapes: shapes.update({"output.weight": (40, 47)}),
            r"has shape \(40, 47\), the engine has \(40, 48\)$",
        ),
        (dict.clear, r"is missing; .* is missing; .* is missing; and \d+ more$"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_declaration(
    models: list[HfStrategy], engine: TransformersGenerator, change: Callable[[dict[str, object]], object], message: str
) -> None:
    before, shapes = answers(engine), shapes_of(models[1])
    change(shapes)  # type: ignore[arg-type]
    with pytest.raises(WrongWeights, match=message):
        engine.take_weights(2, shapes, buckets_of(models[1], 2))
    assert answers(engine) == before


def test_an_older_version_is_refused(models: list[HfStrategy], engine: TransformersGenerator) -> None:
    before = answers(engine)
    with pytest.raises(WrongWeights, match="weights of version 1 came after those of version 1"):
        update(engine, models[1], version=1)
    assert answers(engine) == before


def test_a_source_that_fails_leaves_no_open_update(models: list[HfStrategy], engine: TransformersGenerator) -> None:
    def ends_early() -> Iterator[Bucket]:
        yield next(buckets_of(models[1], 2))
        raise ConnectionError("the trainer is away")

    shapes: Shapes = shapes_of(models[1])
    with pytest.raises(ConnectionError, match="away"):
        engine.take_weights(2, shapes, ends_early())
    with pytest.raises(WrongWeights, match="belongs to no update that is open"):
        engine.take(next(buckets_of(models[1], 2)))
    with pytest.raises(UserError, match="did not end"):
        answers(engine)


def test_a_checksum_by_hand() -> None:
    # Twelve bytes: one word of eight, 1 + 2 * 2**32, and four single bytes, 3 and three zeros.
    assert checksum({"a": torch.tensor([1, 2, 3], dtype=torch.int32)}) == 1 + 2 * 2**32 + 3
    assert checksum({"a": torch.tensor(-1), "b": torch.tensor([2, 0], dtype=torch.uint8)}) == 1
    halves = torch.arange(10, dtype=torch.bfloat16)
    assert checksum({"a": halves}) == checksum({"a": halves[:4], "b": halves[4:8], "c": halves[8:]})


def test_an_engine_without_weights_says_so(tmp_path: Path, models: list[HfStrategy]) -> None:
    engine = TransformersGenerator(engine_of(models[0]).settings, engine_of(models[0]).model)
    engine.start()
    with pytest.raises(UserError, match="cannot generate: no weights have come yet"):
        answers(engine)
