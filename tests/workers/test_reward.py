"""The reward role: the text that a reward function is given."""

from __future__ import annotations

import asyncio
from pathlib import Path

from roll.config import RewardSettings
from roll.data.tasks import Entry
from roll.data.tokenizer import build_char_tokenizer
from roll.environments.environment import Turn
from roll.environments.episodes import Finished
from roll.generation.records import Response, Stop
from roll.workers.reward import RewardWorker


def lengths(responses: list[str], entries: list[Entry]) -> list[int]:
    """A reward function."""
    return [len(response) for response in responses]


def test_a_response_is_its_text_without_the_end_token(tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer("0123456789")  # "1" has id 5: an end token that is no special token.
    tokenizer.save_pretrained(tmp_path)
    worker = RewardWorker(
        settings=RewardSettings(function=f"{__name__}:lengths"),
        tokenizer=tmp_path,
        end_token_ids=(2, 5),
        vocab_size=14,
        role="reward",
        rank=0,
        world_size=1,
    )
    # Ends at 5, ends at 2, was cut, is an end token alone.
    rows = [(6, 7, 5), (6, 2), (6, 7, 6, 6), (5,)]
    responses = [Response(row, ids, None, Stop.END, 1) for row, ids in enumerate(rows)]
    entry = {"answer": "23", "question": "", "metadata": {"source_dataset": "chain_sum"}}

    async def scored() -> list[Turn | Finished]:
        assert await worker.begin([[4]] * 4, [entry] * 4) == [Turn((4,))] * 4
        return await worker.step(responses)

    finished = asyncio.run(scored())
    assert [(end.text, end.reward, end.exact) for end in finished if isinstance(end, Finished)] == [
        ("23", 2, 1),
        ("2", 1, 0),
        ("2322", 4, 0),
        ("", 0, 0),
    ]
