"""Credit of a step's responses, laid onto their batch."""

from __future__ import annotations

from collections.abc import Set

import torch

from roll.algorithms import Credit, check_finite
from roll.errors import UserError
from roll.protocol import DataProto


def with_credit(batch: DataProto, credit: Credit, makes: Set[str]) -> DataProto:
    """The batch with the fields of `credit`; a response that is not kept has no token left in `response_mask`.

    Args:
        batch: the scored responses of a step, `[B, S]`.
        makes: fields that the algorithm declares.

    Raises:
        ValueError: other fields than `makes`, a field of another number of rows, `kept` that is not `[B]` bool, or a
            value per token, `[B, S-1]`, that is not finite where the response is learned from.
    """
    if credit.fields.keys() != makes:
        made, declared = (", ".join(sorted(names)) or "nothing" for names in (credit.fields.keys(), makes))
        raise UserError(f"credit has made {made}, but it declares {declared}")
    mask, kept = batch["response_mask"], credit.kept
    if kept is not None:
        if kept.dtype != torch.bool or kept.shape != (len(batch),):
            raise UserError(f"credit.kept must be {len(batch)} bools, got {kept.dtype} {list(kept.shape)}")
        mask = mask * kept.unsqueeze(1)
    batch = batch.update({**credit.fields, "response_mask": mask})
    learned = mask[:, 1:]
    check_finite(learned, **{name: value for name, value in credit.fields.items() if value.shape == learned.shape})
    return batch
