"""The role that scores responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.data.tasks import checked_rewards, exact_match, load_reward_function
from roll.data.tokenizer_folder import load_tokenizer
from roll.protocol import DataProto
from roll.workers.dispatch import Dispatch, register
from roll.workers.worker import Worker


class RewardWorker(Worker):
    """Decodes responses and calls the reward function on them."""

    def __init__(self, *, function: str, tokenizer: Path, trust_remote_code: bool, **rank: Any) -> None:
        super().__init__(**rank)
        self.function = load_reward_function(function)
        self.tokenizer = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)

    @register(Dispatch.DP_MP_COMPUTE, fields=("input_ids", "response_mask", "entry"), returns_batch=True)
    def score(self, batch: DataProto) -> DataProto:
        """`scores` and `exact` (see `exact_match`), both `[B]`, and the texts as `response`.

        Raises:
            RewardError: the reward function raised, or gave something other than one finite number per response.
        """
        tokens = [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["response_mask"], strict=True)]
        responses = self.tokenizer.batch_decode([ids.tolist() for ids in tokens], skip_special_tokens=True)
        entries = list(batch.non_tensor_batch["entry"])
        return DataProto.from_dict(
            {
                "scores": torch.tensor(checked_rewards(self.function, responses, entries)),
                "exact": torch.tensor(exact_match(responses, entries)),
            },
            non_tensors={"response": np.array(responses, dtype=object)},
        )
