"""Credit of a step's responses, laid onto their batch."""

from __future__ import annotations

from collections.abc import Set

import torch

from roll.algorithms import Credit, check_finite
from roll.errors import UserError
from roll.protocol import DataProto
from roll.protocol.display import describe_value


def readable(batch: DataProto, reads: Set[str]) -> DataProto:
    """The fields that an algorithm says it reads: another one in `credit` would be there in some runs only."""
    tensors = [name for name in batch.tensors if name in reads]
    return batch.select(tensors, [name for name in batch.non_tensor_batch if name in reads])


def with_credit(batch: DataProto, credit: Credit, makes: Set[str]) -> DataProto:
    """The batch with the fields of `credit`; a response that is not kept has no token left in `response_mask`.

    Args:
        batch: the scored responses of a step, `[B, S]`.
        makes: fields that the algorithm declares.

    Raises:
        ValueError: no Credit; other fields than `makes`; a field that is no tensor, or of another number of rows;
            `kept` that is not `[B]` bool; or a value per token, `[B, S-1]`, that is not finite where the response is
            learned from.
    """
    if not isinstance(credit, Credit):
        raise UserError(f"credit must give a Credit, got {type(credit).__name__}")
    if credit.fields.keys() != makes:
        made, declared = (", ".join(sorted(names)) or "nothing" for names in (credit.fields.keys(), makes))
        raise UserError(f"credit has made {made}, but it declares {declared}")
    for name, value in credit.fields.items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"credit has made {name}, which must be a tensor, got {type(value).__name__}")
    mask, kept = batch["response_mask"], credit.kept
    if kept is not None:
        if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool or kept.shape != (len(batch),):
            raise UserError(f"credit.kept must be {len(batch)} bools, got {describe_value(kept)}")
        mask = mask * kept.unsqueeze(1)
    batch = batch.update({**credit.fields, "response_mask": mask})
    learned = mask[:, 1:]
    check_finite(learned, **{name: value for name, value in credit.fields.items() if value.shape == learned.shape})
    return batch
