"""Plays episodes: engine and environments take turns until every environment has given its outcome.

    reward role    begin     ─ turns ─▶ ┐                       ┌ ─▶ step    ─ outcome: the episode has ended
    driver                              │ rows that are open  ─▶┤            ─ turn: appended, unless the row is full
    rollout role             generate ◀─┘         ─ responses ──┘

A row is a prompt of at most `max_prompt_tokens` and what continues it: responses and turns, together at most
`max_new_tokens`. The engine may use up what is left of these. A turn that leaves no room for a response is not
appended: the episode is full, and its environment says what it is worth (`Environment.full`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from roll.data.responses import Continuation, as_rows
from roll.data.tokenizer import padding_id
from roll.environments.episodes import FULL, Finished
from roll.errors import UserError
from roll.generation.batches import pack_requests, unpack_responses
from roll.generation.records import Response
from roll.pipelines.rl_config import RLConfig
from roll.protocol import DataProto
from roll.workers.reward import Reward
from roll.workers.rollout import Rollout

ROUND_SEEDS_APART = 2**30
"""Distance between the seeds of two responses of an episode: more than there are steps."""

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class RowLimits:
    """Size of the rows that episodes make."""

    max_prompt_tokens: int
    max_new_tokens: int
    pad_token_id: int

    @classmethod
    def of(cls, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> RowLimits:
        """The size of a run's rows."""
        return cls(config.task.max_prompt_tokens, config.rollout.max_new_tokens, padding_id(tokenizer))


@dataclass
class _Row:
    prompt: tuple[int, ...]
    rest: Continuation
    finished: Finished | None = None
    stop: str = ""
    full: bool = False

    def take(self, response: Response) -> None:
        self.rest.append(response.token_ids, learned=True, log_probs=response.log_probs)
        self.stop = response.stop.value


class EpisodePlayer:
    """Plays the episodes of a run on its roles."""

    def __init__(self, rollout: Rollout, reward: Reward, limits: RowLimits) -> None:
        self._rollout, self._reward, self._limits = rollout, reward, limits

    def play(
        self,
        prompts: DataProto,
        *,
        seed: int,
        greedy: bool = False,
        phase: Phase = lambda name: nullcontext(),
    ) -> tuple[DataProto, dict[str, float]]:
        """One episode for each prompt.

        Args:
            prompts: `input_ids` and `attention_mask` `[B, P]`, and an `entry` for each row.
            phase: of the run, in which its time is counted.

        Returns:
            The batch of `as_rows` with the prompts' other fields, `scores` and `exact` `[B]`, and for each row the text
            behind its prompt as `response` and why its last response stopped as `stop`; and the means of the outcomes'
            own metrics as `episode/NAME`, with the share of full episodes as `episode/full` if there are any.

        Raises:
            ValueError: an environment begins with too many tokens; and as the calls of a role do.
        """
        ids = [
            row[mask.bool()].tolist() for row, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
        ]
        with phase("reward"):
            turns = self._reward.begin(ids, list(prompts.non_tensor_batch["entry"]))
        rows = [_Row(tuple(turn.token_ids), Continuation()) for turn in turns]
        for place, row in enumerate(rows):
            if len(row.prompt) > self._limits.max_prompt_tokens:
                limit = f"max_prompt_tokens is {self._limits.max_prompt_tokens}"
                raise UserError(f"row {place}: its environment begins with {len(row.prompt)} tokens, {limit}")
        going, rounds, with_log_probs = list(range(len(rows))), 0, True
        while going:
            with phase("rollout"):
                responses = self._generate(rows, going, seed + rounds * ROUND_SEEDS_APART, greedy)
            with_log_probs &= all(response.log_probs is not None for response in responses)
            with phase("reward"):
                going = self._answer(rows, responses)
            rounds += 1
        return self._batch(prompts, rows, with_log_probs), _metrics(rows)

    def _generate(self, rows: list[_Row], going: list[int], seed: int, greedy: bool) -> list[Response]:
        open_rows = [rows[place] for place in going]
        requests = pack_requests(
            [[*row.prompt, *row.rest.token_ids] for row in open_rows],
            [self._room(row) for row in open_rows],
            self._limits.pad_token_id,
        )
        responses = unpack_responses(self._rollout.generate(requests, seed=seed, greedy=greedy))
        return [replace(response, row=going[response.row]) for response in responses]

    def _answer(self, rows: list[_Row], responses: list[Response]) -> list[int]:
        """Take responses and what the environments say of them; the places of the rows that go on."""
        going, full = [], []
        for response, answer in zip(responses, self._reward.step(responses), strict=True):
            row = rows[response.row]
            row.take(response)
            if isinstance(answer, Finished):
                row.finished = answer
            elif len(answer.token_ids) < self._room(row):
                row.rest.append(answer.token_ids, learned=answer.learned)
                going.append(response.row)
            else:
                row.full = True
                full.append(response.row)
        if full:
            for place, finished in zip(full, self._reward.end_full(full), strict=True):
                rows[place].finished = finished
        return going

    def _room(self, row: _Row) -> int:
        return self._limits.max_new_tokens - len(row.rest.token_ids)

    def _batch(self, prompts: DataProto, rows: list[_Row], with_log_probs: bool) -> DataProto:
        batch = as_rows(
            [row.prompt for row in rows],
            [row.rest for row in rows],
            with_log_probs=with_log_probs,
            max_prompt_tokens=self._limits.max_prompt_tokens,
            max_new_tokens=self._limits.max_new_tokens,
            pad_token_id=self._limits.pad_token_id,
        )
        ends = _ends(rows)
        outcomes = {
            "scores": torch.tensor([end.reward for end in ends]),
            "exact": torch.tensor([end.exact for end in ends]),
        }
        texts = {"response": [end.text for end in ends], "stop": [row.stop for row in rows]}
        own = {name: np.array(values, dtype=object) for name, values in texts.items()}
        scored = DataProto.from_dict(
            outcomes, non_tensors=dict(prompts.non_tensor_batch) | own, meta_info=prompts.meta_info
        )
        return batch.union(scored)


def _ends(rows: Sequence[_Row]) -> list[Finished]:
    ends = [row.finished for row in rows if row.finished is not None]
    assert len(ends) == len(rows), "every episode has ended"
    return ends


def _metrics(rows: list[_Row]) -> dict[str, float]:
    """Means over the episodes that have a metric."""
    ends = _ends(rows)
    names = dict.fromkeys(name for end in ends for name in end.metrics)
    found = {name: [end.metrics[name] for end in ends if name in end.metrics] for name in names}
    if any(row.full for row in rows):
        found[FULL] = [float(row.full) for row in rows]
    return {f"episode/{name}": float(np.mean(values)) for name, values in found.items()}
