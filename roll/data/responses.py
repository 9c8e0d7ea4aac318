"""Generated token rows as a batch: which tokens are the response, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.errors import UserError
from roll.protocol import DataProto


def as_responses(
    prompts: DataProto, generated: Tensor, max_new_tokens: int, *, end_token_ids: Sequence[int], pad_token_id: int
) -> DataProto:
    """Prompts with what was generated for them.

    Args:
        prompts: `input_ids` and `attention_mask`, `[B, P]`, padded on the left.
        generated: `[B, n]` token ids, n <= max_new_tokens; what follows a row's first end token is ignored.
        end_token_ids: tokens of which each ends a response.

    Returns:
        `input_ids`, `attention_mask` and `response_mask`, `[B, P + max_new_tokens]`: responses include their end token
        and are padded on the right. `non_tensor_batch` and `meta_info` are the prompts'.

    Raises:
        ValueError: more columns were generated than `max_new_tokens`.
    """
    if generated.shape[1] > max_new_tokens:
        raise UserError(f"{generated.shape[1]} generated tokens are more than max_new_tokens {max_new_tokens}")
    ends = torch.isin(generated, torch.tensor(list(end_token_ids), device=generated.device)).long()
    is_response = (ends.cumsum(dim=1) - ends == 0).long()  # Up to and including the first end.
    missing = max_new_tokens - generated.shape[1]
    is_response = pad(is_response, (0, missing))
    generated = torch.where(is_response.bool(), pad(generated, (0, missing)), pad_token_id)
    mask = prompts["attention_mask"]
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompts["input_ids"], generated], dim=1),
            "attention_mask": torch.cat([mask, is_response], dim=1),
            "response_mask": torch.cat([torch.zeros_like(mask), is_response], dim=1),
        },
        non_tensors=prompts.non_tensor_batch,
        meta_info=prompts.meta_info,
    )
