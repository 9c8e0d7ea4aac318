"""The seam of engines: what of a user's own is refused, by its name, by its settings, and by what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config import ConfigError, RolloutSettings, Settings
from roll.errors import UserError
from roll.generation.generator import ServedModel
from roll.generation.records import LOG_PROBS, Request, Response, Stop
from roll.generation.registry import SHARED, find_engine
from roll.generation.transformers import TransformersGenerator, TransformersSettings
from roll.generation.weights import Bucket
from roll.models.family_tensors import family_shapes
from tests.generation.serving import requests
from tests.outside.table import Table, TableSettings
from tests.strategies.tiny import TINY, write_tiny

PACKAGE = Path(__file__).resolve().parents[2] / "roll" / "generation"


class Changed(Table):
    """A table whose responses a test changes."""

    change: Callable[[list[Response]], list[Any]] = staticmethod(lambda responses: responses)

    def answer(self, requests: Sequence[Request]) -> Iterator[Response]:
        yield from type(self).change(list(super().answer(requests)))


class WithLogProbs(Changed):
    provides = frozenset({LOG_PROBS})


class FreesOnly(Table):
    def free(self) -> None:
        self.tensors = {}


def started(engine_type: type[Table], folder: Path) -> Table:
    settings = TableSettings(name="tests.outside.table:Table", answers=[[7, 2]])
    engine = engine_type(settings, ServedModel(write_tiny(folder), None, "float32", 28, 0, TINY.vocab_size))
    engine.start()
    tensors = {name: torch.zeros(shape) for name, shape in family_shapes(TINY, "lm").items()}
    engine.take_weights(1, family_shapes(TINY, "lm"), [Bucket.of(1, 0, tensors)])
    return engine


def test_an_engine_of_ones_own_answers(tmp_path: Path) -> None:
    engine = started(Table, tmp_path)
    assert list(engine.generate(requests([[6], [8]], length=2))) == [
        Response(0, (7, 2), None, Stop.END, 1),
        Response(1, (7, 2), None, Stop.END, 1),
    ]
    assert [response.stop for response in engine.generate(requests([[6]], length=1))] == [Stop.LENGTH]
    with pytest.raises(UserError, match="engine Table cannot sleep"):
        engine.sleep()
    assert not Table.sleeps() and TransformersGenerator.sleeps()
    assert not FreesOnly.sleeps(), "it could not wake"
    assert len(list(engine.generate(requests([[6]])))) == 1, "a refused sleep changes nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[:1], "gave no response to requests \\[1\\]"),
        (lambda found: [*found, found[0]], "no request waits for response 0"),
        (lambda found: [replace(found[0], row=7)], "no request waits for response 7"),
        (lambda found: [replace(found[0], token_ids=())], "0 tokens, of 1 to 20 that were asked for"),
        (lambda found: [replace(found[0], token_ids=(7,) * 21)], "21 tokens, of 1 to 20"),
        (lambda found: [replace(found[0], token_ids=(7,))], "response 0: stopped for 'end' at token 7"),
        (lambda found: [replace(found[0], stop=Stop.LENGTH)], "response 0: stopped for 'length' at token 2"),
        (lambda found: [replace(found[0], stop="end")], "response 0: stop must be a Stop, got 'end'"),
        (lambda found: [replace(found[0], token_ids=(7, 2, 7, 2))], "response 0: goes on behind end token 2"),
        (lambda found: [replace(found[0], token_ids=(40, 2))], "response 0: has token 40, of a vocabulary of 40"),
        (lambda found: [replace(found[0], token_ids=(-1, 2))], "response 0: has token -1"),
        (lambda found: [(0, (7, 2))], "gave a tuple, not a Response"),
        (lambda found: [replace(found[0], version=2)], "made with weights of version 2, not 1"),
        (lambda found: [replace(found[0], log_probs=(0.0, 0.0))], "log-probs come from an engine that provides"),
    ],
)
def test_what_is_no_valid_answer_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[list[Response]], list[Any]],
    message: str,
) -> None:
    engine = started(Changed, tmp_path)
    monkeypatch.setattr(Changed, "change", staticmethod(change))
    with pytest.raises(UserError, match=rf"engine Changed.*{message}"):
        list(engine.generate(requests([[6], [8]])))


@pytest.mark.parametrize("log_probs", [None, (-1.0,), (-1.0, float("nan"))])
def test_promised_log_probs_must_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_probs: tuple[float, ...] | None
) -> None:
    engine = started(WithLogProbs, tmp_path)
    change = staticmethod(lambda found: [replace(one, log_probs=log_probs) for one in found])
    monkeypatch.setattr(WithLogProbs, "change", change)
    with pytest.raises(UserError, match=r"response 0: (log-probs come from|needs one finite log-prob for each of 2)"):
        list(engine.generate(requests([[6]])))


def test_settings_choose_the_engine_and_its_settings() -> None:
    assert RolloutSettings(max_new_tokens=3).engine == TransformersSettings()
    chosen = RolloutSettings.model_validate({"max_new_tokens": 3, "engine": {"name": "transformers", "batch_size": 4}})
    assert chosen.engine == TransformersSettings(batch_size=4)
    assert RolloutSettings.model_validate({"max_new_tokens": 3, "engine": {"batch_size": 4}}) == chosen
    own = {"name": "tests.outside.table:Table", "answers": [[3]]}
    outside = RolloutSettings.model_validate({"max_new_tokens": 3, "engine": own})
    assert outside.engine == TableSettings(name="tests.outside.table:Table", answers=[[3]])
    assert RolloutSettings.model_validate(outside.model_dump()) == outside


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"name": "vllm"},
            r"engine\.name: must be 'transformers', or module:Name of an engine of your own, got 'vllm'",
        ),
        ({"name": "transformer"}, r"engine\.name: must be .* \(did you mean 'transformers'\?\)"),
        ({"name": "records"}, r"engine\.name: must be 'transformers'"),
        ({"name": "tests.outside.table:Tabel"}, "has no Generator 'Tabel'; near names: Table"),
        ({"name": "tests.outside.table:NOT_AN_ENGINE"}, "is no subclass of roll.generation.generator.Generator"),
        (
            {"name": "roll.generation.generator:Generator"},
            "lacks 'answer', 'start' and 'write', which roll.generation.generator.Generator asks for",
        ),
        ({"name": "tests.outside.table:random"}, "is no subclass of roll.generation.generator.Generator"),
        (
            {"name": "transformers", "batch_sice": 4},
            r"engine\.batch_sice: unknown setting; did you mean engine.batch_size",
        ),
        ({"name": "tests.outside.table:Table"}, r"engine\.answers: this setting is required"),
        ("transformers", r"engine: must be a section of settings, got 'transformers'"),
    ],
)
def test_a_name_of_no_engine(engine: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutSettings.model_validate({"max_new_tokens": 3, "engine": engine})


def test_each_file_of_the_package_is_an_engine() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", *SHARED}
    assert files == {"transformers"}
    for name in files:
        engine = find_engine(name)
        assert issubclass(engine.settings_type, Settings)
        assert engine.settings_type(name=name).name == name
