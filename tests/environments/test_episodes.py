"""Environments in one process: what they are given, the one call that scores a batch, what is said of a wrong one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from roll.config import RewardSettings
from roll.data.tasks import Entry, RewardError, RewardFunction
from roll.data.tokenizer import build_char_tokenizer
from roll.environments.environment import Environment, Given, Outcome, Turn
from roll.environments.episodes import EnvironmentFailed, Episodes, Finished
from roll.environments.registry import SHARED, find_environment
from roll.environments.scoring import BatchedScores
from roll.environments.single_turn import SingleTurn
from roll.errors import UserError
from roll.generation.records import Response, Stop
from tests.outside.asking import Asking

TOKENIZER = build_char_tokenizer("0123456789 no")  # "0" has id 4, "9" id 13, " " id 14, "n" id 15, "o" id 16.
VOCAB = len(TOKENIZER)
PACKAGE = Path(__file__).resolve().parents[2] / "roll" / "environments"


class Calls:
    """A reward function that keeps what it is asked: 1 for the answer itself, else 0."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[str], list[Entry]]] = []

    def __call__(self, responses: list[str], entries: list[Entry]) -> list[float]:
        self.seen.append((responses, entries))
        return [float(text == entry["answer"]) for text, entry in zip(responses, entries, strict=True)]


def entry(answer: str) -> Entry:
    return {"question": "", "answer": answer, "metadata": {"source_dataset": "chain_sum"}}


def episodes_of(made_by: Callable[[Given], Environment], function: Any = None) -> Episodes:
    scores = BatchedScores(function or Calls())
    return Episodes(made_by, "my_module:Mine", scores, TOKENIZER, end_token_ids=(2, 5), vocab_size=VOCAB)


def raised(error: BaseException) -> NoReturn:
    raise error


def response(row: int, *ids: int) -> Response:
    return Response(row, ids, None, Stop.END if ids[-1] in (2, 5) else Stop.LENGTH, 1)


def test_one_turn_is_scored_by_its_text_in_one_call() -> None:
    calls = Calls()
    episodes = episodes_of(SingleTurn, calls)
    answers = ["23", "2", "9", ""]
    entries = [entry(answer) for answer in answers]

    async def played() -> tuple[list[Turn], list[Turn | Finished]]:
        turns = await episodes.begin([[4, 6], [7], [8], [9]], entries)
        # "5" (the token of "1") and 2 are end tokens, and no part of the text.
        return turns, await episodes.step([response(0, 6, 7, 5), response(1, 6, 2), response(2, 6, 7), response(3, 5)])

    turns, finished = asyncio.run(played())
    assert [tuple(turn.token_ids) for turn in turns] == [(4, 6), (7,), (8,), (9,)]
    assert finished == [
        Finished(1.0, {}, "23", 1.0),
        Finished(1.0, {}, "2", 1.0),
        Finished(0.0, {}, "23", 0.0),
        Finished(1.0, {}, "", 1.0),
    ]
    assert calls.seen == [(["23", "2", "23", ""], entries)]


def test_two_turns_by_hand() -> None:
    calls = Calls()
    episodes = episodes_of(Asking, calls)

    async def played() -> list[list[Turn | Finished]]:
        await episodes.begin([[4], [4]], [entry("2"), entry("3")])
        first = await episodes.step([response(0, 6, 2), response(1, 6, 2)])
        return [first, await episodes.step([response(1, 7, 2)])]

    first, second = asyncio.run(played())
    assert first == [Finished(1.0, {"asked": 1.0}, "2", 1.0), Turn((15, 16, 14))]
    assert second == [Finished(0.5, {"asked": 2.0}, "2no 3", 1.0)]
    assert [texts for texts, _ in calls.seen] == [["2", "2"], ["3"]]


def test_a_full_episode_says_what_it_is_worth_without_the_turn_that_did_not_fit() -> None:
    episodes = episodes_of(Asking)

    async def played() -> list[Finished]:
        await episodes.begin([[4]], [entry("2")])
        await episodes.step([response(0, 7, 7)])
        return await episodes.end_full([0])

    assert asyncio.run(played()) == [Finished(0.0, {"asked": 2.0}, "33", 0.0)]


class Wrong(Environment):
    """Does in `step` what a test tells it; row 0 behaves."""

    what: Any = None

    async def reset(self) -> Turn:
        return Turn(self.given.prompt_ids)

    async def step(self, response: Response) -> Any:
        return Outcome(1.0) if self.given.prompt_ids == (4,) else type(self).what()


class WrongStart(Wrong):
    async def reset(self) -> Any:
        return Turn(self.given.prompt_ids) if self.given.prompt_ids == (4,) else type(self).what()


@pytest.mark.parametrize("kind", [Wrong, WrongStart])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "raised SystemExit: 3"),
        (lambda: raised(asyncio.CancelledError()), "raised CancelledError"),
        (lambda: None, "gave a NoneType, not a Turn"),
        (lambda: Turn([]), r"gave tokens \[\], wanted are at least one token, and all from 0 to 16"),
        (lambda: Turn([3, 17]), r"gave tokens \[3, 17\], wanted are .* 0 to 16"),
        (lambda: Turn([-1]), r"gave tokens \[-1\]"),
        (lambda: Turn("ab"), "gave tokens that are not integers: 'str' object"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_turn_is_named_with_its_row(
    monkeypatch: pytest.MonkeyPatch, kind: type[Wrong], what: Callable[[], object], message: str
) -> None:
    monkeypatch.setattr(Wrong, "what", staticmethod(what))
    method = "reset" if kind is WrongStart else "step"
    with pytest.raises(EnvironmentFailed, match=f"^environment my_module:Mine, row 1: {method} {message}"):
        asyncio.run(_begin_and_step(episodes_of(kind)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: Outcome(float("nan")), "step gave the reward nan, which is not finite"),
        (lambda: Outcome("1"), "step gave the reward '1', which is not a number"),  # type: ignore[arg-type]
        (lambda: Outcome(1.0, {"steps": float("inf")}), "step gave 'steps' inf, which is not finite"),
        (lambda: Outcome(10**5000), "step gave the reward inf, which is not finite"),
        (lambda: Outcome(1.0, {"full": 1.0}), "step gave a metric named 'full', which the run itself reports"),
        (lambda: Outcome(1.0, None), "step gave metrics None, not a mapping of names to numbers"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_outcome_is_named_with_its_row(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[], object], message: str
) -> None:
    monkeypatch.setattr(Wrong, "what", staticmethod(what))
    with pytest.raises(EnvironmentFailed, match=f"^environment my_module:Mine, row 1: {message}"):
        asyncio.run(_begin_and_step(episodes_of(Wrong)))


def test_a_prompt_is_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "what", staticmethod(lambda: Turn([4], learned=True)))
    with pytest.raises(EnvironmentFailed, match="row 1: reset gave a turn that is learned from"):
        asyncio.run(_begin_and_step(episodes_of(WrongStart)))


def test_an_environment_that_cannot_be_made_is_named() -> None:
    def made_by(given: Given) -> Environment:
        raise KeyError("secret")

    with pytest.raises(EnvironmentFailed, match="row 0: reset raised KeyError: 'secret'"):
        asyncio.run(_begin_and_step(episodes_of(made_by)))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda texts, entries: [1.0], "returned 1 rewards for 2 responses"),
        (lambda texts, entries: [10**5000, 1], "returned for response 0 inf, which is not finite"),
        (lambda texts, entries: torch.zeros(2, device="meta"), "raised NotImplementedError: .*meta"),
        (lambda texts, entries: sys.exit(3), "raised SystemExit: 3"),
    ],
)
def test_a_wrong_reward_function_is_named_itself(function: RewardFunction, message: str) -> None:
    with pytest.raises(RewardError, match=rf"reward function .*lambda> {message}"):
        asyncio.run(_begin_and_step(episodes_of(SingleTurn, function)))


def test_an_episode_that_gives_up_waiting_leaves_the_others_their_score() -> None:
    class Hasty(SingleTurn):
        async def step(self, response: Response) -> Outcome:
            scored = asyncio.ensure_future(super().step(response))
            if response.row == 0:
                await asyncio.sleep(0)  # Until it has asked.
                scored.cancel()
                return Outcome(-1.0)
            return await scored

    first, second = asyncio.run(_begin_and_step(episodes_of(Hasty)))
    assert isinstance(first, Finished) and first.reward == -1
    assert isinstance(second, Finished) and second.reward == 0


def test_no_episode_waits_for_a_score_that_does_not_come() -> None:
    def cancelled(texts: list[str], entries: list[Entry]) -> NoReturn:
        raise asyncio.CancelledError

    with pytest.raises(EnvironmentFailed, match="row 0: step raised CancelledError"):
        asyncio.run(_begin_and_step(episodes_of(SingleTurn, cancelled)))


async def _begin_and_step(episodes: Episodes) -> list[Turn | Finished]:
    await episodes.begin([[4], [6]], [entry("2"), entry("3")])
    return await episodes.step([response(0, 6, 2), response(1, 6, 2)])


def test_names_of_environments() -> None:
    assert find_environment(RewardSettings().environment) is SingleTurn
    assert find_environment("tests.outside.asking:Asking") is Asking
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", *SHARED}
    assert files == {"single_turn"} and all(issubclass(find_environment(name), Environment) for name in files)
    for name, message in (
        ("single", r"must be 'single_turn' \(did you mean 'single_turn'\?\), or module:Name"),
        ("episodes", "must be 'single_turn'"),
        ("tests.outside.asking:Turn", "is no subclass of roll.environments.environment.Environment"),
        ("roll.environments.environment:Environment", "lacks 'reset' and 'step', which roll.environments"),
        ("no_such_module:Mine", "^environment 'no_such_module:Mine': cannot import"),
        ("tests.outside.asking:Askin", "has no Environment 'Askin'; near names: Asking"),
    ):
        with pytest.raises(UserError, match=message):
            find_environment(name)
