"""The fields that strategies read, and the check that a batch has them as they should be.

Prompts are padded on the left, responses on the right. A per-token result at index t speaks of token t+1, so it has
one column less than the tokens, and its loss mask is `response_mask[:, 1:]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.errors import UserError
from roll.protocol.data_proto import DataProto


@dataclass(frozen=True)
class Field:
    """The dtype of a field and its columns: S (one for each token) or S-1 (one for each token but the first)."""

    dtype: torch.dtype
    per_next_token: bool = False


MODEL_FIELDS: dict[str, Field] = {
    "input_ids": Field(torch.int64),
    "attention_mask": Field(torch.int64),
    "response_mask": Field(torch.int64),
    "log_probs": Field(torch.float32, per_next_token=True),
    "ref_log_probs": Field(torch.float32, per_next_token=True),
    "values": Field(torch.float32, per_next_token=True),
    "advantages": Field(torch.float32, per_next_token=True),
    "returns": Field(torch.float32, per_next_token=True),
    "token_rewards": Field(torch.float32, per_next_token=True),
}
"""What strategies read. attention_mask is a run of ones in each row; response_mask is 1 on the tokens to be learned,
and may have holes (what a tool said between two answers)."""

REQUIRED = ("input_ids", "attention_mask")


def check_model_batch(batch: DataProto, vocab_size: int | None = None, max_positions: int | None = None) -> None:
    """Refuse a batch that a model cannot read.

    Fields that are not in MODEL_FIELDS are left alone. A row without any token is legal.

    Args:
        batch: at least `input_ids` and `attention_mask`.
        vocab_size: ids of real tokens must be below; None leaves that out.
        max_positions: real tokens of a row; None leaves that out.

    Raises:
        ValueError: names the field, the first row that is wrong, and the values.
    """
    tensors = batch.tensors
    missing = [name for name in REQUIRED if name not in tensors]
    if missing:
        raise UserError(f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(tensors)) or 'no tensors'}")
    fields = {name: tensors[name] for name in MODEL_FIELDS if name in tensors}
    _check_types(fields)
    _check_masks(fields["attention_mask"], fields.get("response_mask"))
    _check_tokens(fields["input_ids"], fields["attention_mask"] == 1, vocab_size, max_positions)
    for name, tensor in fields.items():
        if tensor.is_floating_point():
            row = _first_row(~tensor.isfinite())
            if row is not None:
                raise UserError(f"{name}: row {row} has a value that is NaN or infinite")


def _check_types(fields: dict[str, Tensor]) -> None:
    """Dtypes, and the shapes [B, S] and [B, S-1] with the S of input_ids."""
    ids = fields["input_ids"]
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise UserError(f"input_ids must be [B, S] with S at least 1, got {list(ids.shape)}")
    rows, columns = ids.shape
    for name, tensor in fields.items():
        expected = MODEL_FIELDS[name]
        shape = [rows, columns - 1 if expected.per_next_token else columns]
        if list(tensor.shape) != shape:
            kind = "[B, S-1]" if expected.per_next_token else "[B, S]"
            raise UserError(
                f"{name} must be {kind} = {shape}, as input_ids is {list(ids.shape)}; got {list(tensor.shape)}"
            )
        if tensor.dtype != expected.dtype:
            raise UserError(f"{name} must be {expected.dtype}, got {tensor.dtype}")


def _check_masks(attention: Tensor, response: Tensor | None) -> None:
    for name, mask in (("attention_mask", attention), ("response_mask", response)):
        if mask is None:
            continue
        row = _first_row((mask != 0) & (mask != 1))
        if row is not None:
            raise UserError(f"{name}: row {row} has values other than 0 and 1: {sorted(set(mask[row].tolist()))}")
    rises = torch.diff(attention, dim=1, prepend=attention.new_zeros(len(attention), 1)) == 1
    row = _first_row(rises.sum(dim=1, keepdim=True) > 1)
    if row is not None:
        raise UserError(f"attention_mask: row {row} has a hole; its tokens must stand side by side")
    if response is not None:
        row = _first_row((response == 1) & (attention == 0))
        if row is not None:
            raise UserError(f"response_mask: row {row} marks a token that attention_mask leaves out")


def _check_tokens(ids: Tensor, real: Tensor, vocab_size: int | None, max_positions: int | None) -> None:
    if vocab_size is not None:
        outside = real & ((ids < 0) | (ids >= vocab_size))
        row = _first_row(outside)
        if row is not None:
            wrong = int(ids[row][outside[row]][0])
            raise UserError(f"input_ids: row {row} has id {wrong}, outside the vocabulary of {vocab_size}")
    if max_positions is not None:
        lengths = real.sum(dim=1)
        row = _first_row(lengths.unsqueeze(1) > max_positions)
        if row is not None:
            raise UserError(f"row {row} has {int(lengths[row])} tokens, the model's context is {max_positions}")


def _first_row(wrong: Tensor) -> int | None:
    """The first row of [B, n] that has any True."""
    rows = wrong.any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None
