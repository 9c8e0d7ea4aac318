"""The transformers engine: where responses end, the log-probs it sampled with, what seeds decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.errors import UserError
from roll.generation.records import Response, Stop
from roll.generation.transformers import TransformersGenerator
from roll.platform import Platform, get_platform
from roll.protocol import DataProto
from roll.strategies import HfStrategy
from tests.generation.serving import engine_of, model_of, requests, update
from tests.strategies.tiny import write_tiny

ENDS = (2, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> HfStrategy:
    return model_of(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def engine(model: HfStrategy) -> TransformersGenerator:
    return engine_of(model)


def prompts(rows: int, width: int = 4) -> list[list[int]]:
    drawn: Tensor = torch.randint(6, 40, (rows, width), generator=torch.Generator().manual_seed(0))
    return drawn.tolist()


def ragged(rows: int) -> list[list[int]]:
    return [row[row_number % 5 :] for row_number, row in enumerate(prompts(rows, width=8))]


def by_row(responses: Any) -> list[Response]:
    return sorted(responses, key=lambda response: response.row)


def test_a_response_ends_at_the_first_of_all_end_tokens(engine: TransformersGenerator) -> None:
    seen = set()
    for response in by_row(engine.generate(requests(prompts(64), temperature=5.0))):
        ids = response.token_ids
        ends = [place for place, token in enumerate(ids) if token in ENDS]
        assert ends in ([], [len(ids) - 1]), ids
        assert (response.stop, bool(ends)) in ((Stop.END, True), (Stop.LENGTH, False))
        assert ends or len(ids) == 20
        assert response.log_probs is not None and len(response.log_probs) == len(ids)
        seen |= {ids[place] for place in ends} | {response.stop}
    assert seen == {*ENDS, Stop.END, Stop.LENGTH}, "all of them occurred, so there was something to see"


def test_generation_itself_stops_there(engine: TransformersGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    generate = engine.network.generate

    def recorded(**options: Any) -> torch.Tensor:
        rows: torch.Tensor = generate(**options)
        widths.append(rows.shape[1])
        return rows

    monkeypatch.setattr(engine.network, "generate", recorded)
    responses = engine.generate(requests(prompts(3), temperature=None, ends=tuple(range(40))))
    assert [len(response.token_ids) for response in responses] == [1, 1, 1]
    assert widths == [8 + 1], "as wide as the longest row that leaves room for 20 new tokens: 28 - 20"


@pytest.mark.parametrize("temperature", [1.0, 0.7, None])
def test_log_probs_are_those_of_a_forward_pass(
    model: HfStrategy, engine: TransformersGenerator, temperature: float | None
) -> None:
    asked = requests(ragged(6), temperature=temperature)
    for request, response in zip(asked, by_row(engine.generate(asked)), strict=True):
        row = torch.tensor([*request.token_ids, *response.token_ids])[None]
        batch = DataProto.from_dict({"input_ids": row, "attention_mask": torch.ones_like(row)})
        logits = model.forward_step(batch, lambda data, output: {"logits": output.logits()})["logits"][0]
        distribution = (logits.double() / (temperature or 1.0)).log_softmax(-1)
        start = len(request.token_ids) - 1
        expected = [float(distribution[start + i, token]) for i, token in enumerate(response.token_ids)]
        torch.testing.assert_close(response.log_probs, tuple(expected), rtol=0, atol=1e-5)
        if temperature is None:
            # Of two tokens that differ by less than fp32 sums do, either may be taken.
            likeliest = distribution[start:-1].max(dim=-1).values
            torch.testing.assert_close(torch.tensor(expected).double(), likeliest, rtol=0, atol=1e-5)


def test_the_first_seed_of_a_call_decides_all_draws(model: HfStrategy, engine: TransformersGenerator) -> None:
    def drawn(seed: int, **changes: Any) -> list[tuple[int, ...]]:
        one = engine_of(model, **changes) if changes else engine
        return [response.token_ids for response in by_row(one.generate(requests(prompts(8), seed=seed)))]

    first = drawn(3)
    torch.rand(5)  # The generator of this process has no say.
    assert drawn(3) == first
    assert drawn(4) != first
    in_batches = drawn(3, batch_size=2)
    assert in_batches != first
    # Were each batch seeded anew, equal prompts would get equal responses.
    alike = by_row(
        engine_of(model, batch_size=1).generate([replace(one, token_ids=(6, 7)) for one in requests(prompts(4))])
    )
    assert len({response.token_ids for response in alike}) > 1


def test_requests_of_one_call_may_differ(engine: TransformersGenerator) -> None:
    asked = requests(prompts(4), temperature=None)
    limits = (3, 20, 1, 7)
    mixed = [
        replace(one, sampling=replace(one.sampling, max_new_tokens=n)) for one, n in zip(asked, limits, strict=True)
    ]
    mixed.append(replace(requests(prompts(1), temperature=5.0)[0], row=4))
    whole = by_row(engine.generate(asked))
    *cut, sampled = by_row(engine.generate(mixed))
    for long, short, limit in zip(whole, cut, limits, strict=True):
        assert short.token_ids == long.token_ids[:limit]
        assert short.stop is (Stop.LENGTH if len(long.token_ids) > limit else long.stop)
    assert sampled.token_ids[:3] != whole[0].token_ids[:3]


@pytest.mark.parametrize(
    ("prompt", "said"), [([6] * 9, ": 29 tokens with its response, the limit is 28"), ([], " has no tokens")]
)
def test_a_request_that_the_model_has_no_room_for(engine: TransformersGenerator, prompt: list[int], said: str) -> None:
    with pytest.raises(UserError, match=f"request 0{said}"):
        list(engine.generate(requests([prompt])))


def test_an_engine_that_sleeps_has_no_weights(
    monkeypatch: pytest.MonkeyPatch, model: HfStrategy, engine: TransformersGenerator
) -> None:
    freed: list[int] = []

    def empty_cache(platform: Platform) -> None:
        freed.append(sum(parameter.untyped_storage().nbytes() for parameter in engine.network.parameters()))

    monkeypatch.setattr(type(get_platform()), "empty_cache", empty_cache)
    asked = requests(prompts(3))
    before = by_row(engine.generate(asked))
    engine.wake()  # It is awake: nothing happens.
    assert by_row(engine.generate(asked)) == before
    engine.sleep()
    assert freed == [0], "the device's cache is given back once the weights are gone"
    with pytest.raises(UserError, match="TransformersGenerator cannot generate: it sleeps"):
        list(engine.generate(asked))
    with pytest.raises(UserError, match="version 2 came to an engine that sleeps"):
        update(engine, model, version=2)
    engine.wake()
    with pytest.raises(UserError, match="it has slept, and no weights have come since"):
        list(engine.generate(asked))
    update(engine, model, version=2)
    assert by_row(engine.generate(asked)) == [replace(response, version=2) for response in before]
