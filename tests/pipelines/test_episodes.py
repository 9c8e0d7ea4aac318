"""Episodes of several turns, with an engine and environments that follow a script: rows, masks and ends by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch

from roll.environments.environment import Turn
from roll.environments.episodes import Finished
from roll.errors import UserError
from roll.generation.batches import pack_requests, pack_responses
from roll.generation.records import Response, Stop
from roll.pipelines.episodes import ROUND_SEEDS_APART, EpisodePlayer, RowLimits
from roll.protocol import DataProto
from roll.workers.reward import Reward
from roll.workers.rollout import Rollout

LIMITS = RowLimits(max_prompt_tokens=3, max_new_tokens=6, pad_token_id=0)
ENTRIES = [{"answer": str(row)} for row in range(3)]


class Engine:
    """Answers each round of requests with the next of its responses; keeps what it was asked."""

    def __init__(self, rounds: list[list[tuple[int, ...]]], log_probs: bool) -> None:
        self.rounds, self.log_probs = iter(rounds), log_probs
        self.asked: list[tuple[list[list[int]], list[int], int, bool]] = []

    def generate(self, requests: DataProto, *, seed: int, greedy: bool) -> DataProto:
        rows = zip(requests["input_ids"], requests["attention_mask"], strict=True)
        prompts = [row[mask.bool()].tolist() for row, mask in rows]
        self.asked.append((prompts, requests["max_new_tokens"].tolist(), seed, greedy))
        return pack_responses(
            (
                Response(
                    row,
                    ids,
                    tuple(-float(token) for token in ids) if self.log_probs else None,
                    Stop.END if ids[-1] == 2 else Stop.LENGTH,
                    1,
                )
                for row, ids in enumerate(next(self.rounds))
            ),
            LIMITS.max_new_tokens,
        )


class Script:
    """Environments that answer row by row from a list."""

    def __init__(self, answers: list[list[Turn | Finished]], starts: list[list[int]]) -> None:
        self.answers, self.starts = [iter(row) for row in answers], starts
        self.heard: list[Response] = []

    def begin(self, prompts: list[list[int]], entries: list[Any]) -> list[Turn]:
        assert prompts == [[5], [6, 7], [8]] and entries == ENTRIES
        return [Turn(ids) for ids in self.starts]

    def step(self, responses: list[Response]) -> list[Turn | Finished]:
        self.heard += responses
        return [next(self.answers[response.row]) for response in responses]

    def end_full(self, rows: list[int]) -> list[Finished]:
        return [Finished(-1.0, {"turns": 9.0}, "full", 0.0) for _ in rows]


def end(reward: float, **metrics: float) -> Finished:
    return Finished(reward, metrics, f"worth {reward}", 1.0)


def played(
    rounds: list[list[tuple[int, ...]]],
    answers: list[list[Turn | Finished]],
    starts: list[list[int]] | None = None,
    *,
    log_probs: bool = True,
    **how: Any,
) -> tuple[DataProto, dict[str, float], Engine, Script]:
    prompts = pack_requests([[5], [6, 7], [8]], [0, 0, 0], pad_token_id=0).select(["input_ids", "attention_mask"], [])
    prompts = prompts.union(DataProto.from_dict({}, non_tensors={"entry": np.array(ENTRIES, dtype=object)}))
    engine, script = Engine(rounds, log_probs), Script(answers, starts or [[5], [6, 7], [8]])
    player = EpisodePlayer(cast(Rollout, engine), cast(Reward, script), LIMITS)
    batch, metrics = player.play(prompts, seed=11, **how)
    return batch, metrics, engine, script


ROUNDS: list[list[tuple[int, ...]]] = [[(4, 2), (9, 2), (3, 3, 3, 3)], [(1, 1, 2), (7, 2)], [(2,)]]
ANSWERS: list[list[Turn | Finished]] = [
    [Turn([8]), end(0.5, turns=2.0)],
    [Turn([7], learned=True), Turn([4]), Turn([1])],
    [end(0.25, turns=1.0)],
]


def test_turns_by_hand() -> None:
    answers = [*ANSWERS[:1], [Turn([7], learned=True), end(2.0)], *ANSWERS[2:]]
    batch, metrics, engine, script = played(ROUNDS[:2], answers)
    # Row 0: prompt 5, response 4 2, turn 8, response 1 1 2. Row 1: prompt 6 7, 9 2, learned turn 7, 7 2. Row 2: one.
    assert batch["input_ids"].tolist() == [
        [0, 0, 5, 4, 2, 8, 1, 1, 2],
        [0, 6, 7, 9, 2, 7, 7, 2, 0],
        [0, 0, 8, 3, 3, 3, 3, 0, 0],
    ]
    assert batch["attention_mask"].tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1, 1, 0, 0],
    ]
    assert batch["response_mask"].tolist() == [
        [0, 0, 0, 1, 1, 0, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
    ]
    nan = math.nan
    sampled = [[0, 0, -4, -2, 0, -1, -1, -2], [0, 0, -9, -2, nan, -7, -2, 0], [0, 0, -3, -3, -3, -3, 0, 0]]
    expected = torch.tensor(sampled, dtype=torch.float32)
    torch.testing.assert_close(batch["rollout_log_probs"], expected, rtol=0, atol=0, equal_nan=True)
    assert batch["scores"].tolist() == [0.5, 2.0, 0.25]
    assert batch["response"].tolist() == ["worth 0.5", "worth 2.0", "worth 0.25"]
    assert batch["stop"].tolist() == ["end", "end", "length"]
    assert batch["entry"].tolist() == ENTRIES
    assert metrics == {"episode/turns": 1.5}, "of the two episodes that have it"
    assert engine.asked == [
        ([[5], [6, 7], [8]], [6, 6, 6], 11, False),
        ([[5, 4, 2, 8], [6, 7, 9, 2, 7]], [3, 3], 11 + ROUND_SEEDS_APART, False),
    ]
    assert [(one.row, one.token_ids, one.stop) for one in script.heard[3:]] == [
        (0, (1, 1, 2), Stop.END),
        (1, (7, 2), Stop.END),
    ]


def test_a_turn_that_leaves_no_room_ends_the_episode() -> None:
    # Row 0 has 6 tokens after its second response, row 1 has 5 and a turn of one token would fill it.
    answers = [[Turn([8]), Turn([8])], [Turn([7]), Turn([1])], [end(0.25)]]
    batch, metrics, _, _ = played(ROUNDS[:2], answers, log_probs=False)
    assert batch["scores"].tolist() == [-1.0, -1.0, 0.25]
    assert batch["attention_mask"].sum(dim=1).tolist() == [1 + 6, 2 + 5, 1 + 4]
    assert batch["response"].tolist()[:2] == ["full", "full"]
    assert metrics == {"episode/turns": 9.0, "episode/full": pytest.approx(2 / 3)}
    assert "rollout_log_probs" not in batch.tensors


def test_an_environment_begins_with_tokens_of_its_own() -> None:
    ends: list[list[Turn | Finished]] = [[end(1.0)], [end(1.0)], [end(1.0)]]
    phases: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    batch, metrics, engine, _ = played(ROUNDS[:1], ends, [[1, 1, 1], [6], [8]], greedy=True, phase=phase)
    assert batch["input_ids"][:, :3].tolist() == [[1, 1, 1], [0, 0, 6], [0, 0, 8]]
    assert engine.asked == [([[1, 1, 1], [6], [8]], [6, 6, 6], 11, True)]
    assert phases == ["reward", "rollout", "reward"] and metrics == {}
    with pytest.raises(UserError, match="row 1: its environment begins with 4 tokens, max_prompt_tokens is 3"):
        played(ROUNDS[:1], ends, [[5], [6] * 4, [8]])
