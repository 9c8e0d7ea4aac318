"""The reward role: the text that a reward function is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from roll.data.tasks import Entry
from roll.data.tokenizer import build_char_tokenizer
from roll.protocol import DataProto
from roll.workers.reward import RewardWorker


def lengths(responses: list[str], entries: list[Entry]) -> list[int]:
    """A reward function."""
    return [len(response) for response in responses]


def test_a_response_is_its_text_without_the_end_token(tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer("0123456789")  # "1" has id 5: an end token that is no special token.
    tokenizer.save_pretrained(tmp_path)
    worker = RewardWorker(
        function=f"{__name__}:lengths",
        tokenizer=tmp_path,
        end_token_ids=(2, 5),
        role="reward",
        rank=0,
        world_size=1,
    )
    # Ends at 5, ends at 2, was cut, is an end token alone, is nothing.
    rows = [[4, 6, 7, 5, 0], [4, 6, 2, 0, 0], [4, 6, 7, 6, 6], [4, 5, 0, 0, 0], [4, 0, 0, 0, 0]]
    masks = [[0, 1, 1, 1, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    entry = {"answer": "23", "question": "", "metadata": {"source_dataset": "chain_sum"}}
    batch = DataProto.from_dict(
        {"input_ids": torch.tensor(rows), "response_mask": torch.tensor(masks)},
        {"entry": np.array([entry] * 5, dtype=object)},
    )
    scored = worker.score(batch)
    assert scored.non_tensor_batch["response"].tolist() == ["23", "2", "2322", "", ""]
    assert scored["scores"].tolist() == [2, 1, 4, 0, 0]
    assert scored["exact"].tolist() == [1, 0, 0, 0, 0]
