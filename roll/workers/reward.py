"""The role that scores responses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.config import expand_path
from roll.data.tasks import checked_rewards, exact_match, load_reward_function
from roll.data.tokenizer_folder import load_tokenizer
from roll.protocol import DataProto
from roll.workers.dispatch import Dispatch
from roll.workers.method import register
from roll.workers.role import Role
from roll.workers.worker import Worker


class RewardWorker(Worker):
    """Decodes responses and calls the reward function on them."""

    def __init__(
        self,
        *,
        function: str,
        tokenizer: str | Path,
        end_token_ids: Sequence[int],
        trust_remote_code: bool = False,
        **rank: Any,
    ) -> None:
        super().__init__(**rank)
        self.end_token_ids = frozenset(end_token_ids)
        self.function = load_reward_function(function)
        self.tokenizer = load_tokenizer(expand_path(tokenizer), trust_remote_code=trust_remote_code)

    @register(Dispatch.DP_MP_COMPUTE, fields=("input_ids", "response_mask", "entry"), returns_batch=True)
    def score(self, batch: DataProto) -> DataProto:
        """`scores` and `exact` (see `exact_match`), both `[B]`, and the texts, without end tokens, as `response`.

        Raises:
            RewardError: the reward function raised, or gave something other than one finite number per response.
        """
        pairs = zip(batch["input_ids"], batch["response_mask"], strict=True)
        tokens = [self._without_end(row[mask.bool()].tolist()) for row, mask in pairs]
        responses = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        entries = list(batch.non_tensor_batch["entry"])
        return DataProto.from_dict(
            {
                "scores": torch.tensor(checked_rewards(self.function, responses, entries)),
                "exact": torch.tensor(exact_match(responses, entries)),
            },
            non_tensors={"response": np.array(responses, dtype=object)},
        )

    def _without_end(self, ids: list[int]) -> list[int]:
        """A response without its end token, which need not be a special token of the tokenizer."""
        return ids[:-1] if ids and ids[-1] in self.end_token_ids else ids


class Reward(Role, RewardWorker):
    """All ranks that score responses."""
