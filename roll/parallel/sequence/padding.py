"""Padding sequences so that they divide, splitting them, and shifting their labels.

A dispatched model shifts its `labels` across the ranks. Whoever computes a loss from the logits of a part shifts labels
over the whole sequence first, pads, then splits (`shift_labels`): shifted in its part, the label at its end is lost.

Legend: b rows, N tokens of a row, n ranks of the sequence-parallel group.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from roll.errors import UserError
from roll.parallel.sequence.call_forms import check_group, check_number, or_later_form
from roll.parallel.sequence.groups import sequence_group

IGNORED_LABEL = -100


class PackedInputs(NamedTuple):
    """One row of documents that divides, as a dispatched model takes it after the split."""

    tokens: Tensor
    """`[1, N]`."""
    cu_seqlens: Tensor
    """`[documents + 1]` int32, from 0 to N: where documents begin. Whole on every rank, never split."""
    max_length: int
    """Tokens of the longest document, padding counted as one."""
    labels: Tensor | None
    """`[1, N]`."""
    position_ids: Tensor
    """`[1, N]`, from 0 in every document."""


def shift_labels(labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Labels at the position that predicts them: `[b, N]` of t to `[b, N]` of t + 1, ignored at the end.

    With `cu_seqlens` (`[documents + 1]` over the flat `[b * N]`) the end of every document predicts nothing. To be
    called on whole sequences, before they are padded and split.

    Raises:
        ValueError: `cu_seqlens` does not lead from 0 to b * N.
    """
    shifted = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].contiguous()
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        if bounds[:1] != [0] or bounds[-1] != labels.numel() or any(b < a for a, b in pairwise(bounds)):
            raise UserError(f"cu_seqlens must rise from 0 to the {labels.numel()} labels, got {bounds}")
        ends = cu_seqlens[1:].to(labels.device).long()
        shifted.view(-1)[ends[ends > 0] - 1] = IGNORED_LABEL
    return shifted


def pad_tensor(x: Tensor, value: float, dim: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """`x` with `value` at the end of `dim` until it divides by the ranks of the group; `x` itself if it does."""
    missing = -x.shape[dim] % _ranks(group)
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat((x, x.new_full(shape, value)), dim=dim)


def split_tensor(x: Tensor, dim: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """This rank's part of what all ranks have. Differentiable: a rank's gradient is zero outside its part.

    Raises:
        ValueError: `dim` does not divide by the ranks of the group.
    """
    group = sequence_group(group)
    if group is None:
        return x
    if x.shape[dim] % group.size():
        raise UserError(
            f"dim {dim} of {tuple(x.shape)} does not divide by the {group.size()} ranks that share a sequence: "
            "pad_for_sequence_parallel first"
        )
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _second_is_no_tensor(given: tuple[Any, ...]) -> bool:
    return len(given) > 1 and not (given[1] is None or isinstance(given[1], Tensor))


def _pad_as_later(tensor: Tensor, padding_value: float, dim: int = -1) -> Tensor:
    """One tensor, as XTuner v0.1.19 to v0.2.0 pad it."""
    check_number("padding_value", padding_value)
    _check_dim("tensor", tensor, dim)
    return pad_tensor(tensor, padding_value, dim)


def _split_as_later(input: Tensor, dim: int, sp_group: ProcessGroup | None = None) -> Tensor:
    """One tensor, as XTuner v0.1.18 to v0.2.0 split it."""
    _check_dim("input", input, dim)
    check_group(sp_group)
    return split_tensor(input, dim, sp_group)


@overload
def pad_for_sequence_parallel(
    tokens: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    tokens_pad_index: int = 0,
    labels_pad_index: int = IGNORED_LABEL,
    position_ids_pad_index: int = 0,
    attention_mask_pad_index: int = 0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...
@overload
def pad_for_sequence_parallel(tensor: Tensor, padding_value: float, dim: int = -1) -> Tensor: ...
@or_later_form(_pad_as_later, _second_is_no_tensor)
def pad_for_sequence_parallel(
    tokens: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    tokens_pad_index: int = 0,
    labels_pad_index: int = IGNORED_LABEL,
    position_ids_pad_index: int = 0,
    attention_mask_pad_index: int = 0,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Pad rows on the right so that they divide by the ranks that share a sequence. What divides is returned as it is.

    All are `[b, N]`; position_ids may be `[1, N]`.

    XTuner v0.1.19 to v0.2.0 pad one tensor with (tensor, padding_value, dim=-1), and so this can be called too: a
    number in the second place, or one of these names, tells. The result is one tensor then.

    Raises:
        ValueError: shapes do not fit those of the tokens.
    """
    _check_shapes(tokens, labels=labels, position_ids=position_ids, attention_mask=attention_mask)
    return (
        pad_tensor(tokens, tokens_pad_index, group=group),
        None if labels is None else pad_tensor(labels, labels_pad_index, group=group),
        None if position_ids is None else pad_tensor(position_ids, position_ids_pad_index, group=group),
        None if attention_mask is None else pad_tensor(attention_mask, attention_mask_pad_index, group=group),
    )


@overload
def split_for_sequence_parallel(
    tokens: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]: ...
@overload
def split_for_sequence_parallel(input: Tensor, dim: int, sp_group: ProcessGroup | None = None) -> Tensor: ...
@or_later_form(_split_as_later, _second_is_no_tensor)
def split_for_sequence_parallel(
    tokens: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's part of every row, `[b, N/n]` each. The attention mask stays whole.

    XTuner v0.1.18 to v0.2.0 split one tensor with (input, dim, sp_group), and so this can be called too, with one
    tensor as the result. None for `sp_group` is the group of this process, where XTuner's takes all ranks.

    Raises:
        ValueError: rows do not divide, or shapes do not fit those of the tokens.
    """
    _check_shapes(tokens, labels=labels, position_ids=position_ids)
    return (
        split_tensor(tokens, group=group),
        None if labels is None else split_tensor(labels, group=group),
        None if position_ids is None else split_tensor(position_ids, group=group),
    )


def pad_packed_for_sequence_parallel(
    tokens: Tensor,
    cu_seqlens: Tensor,
    labels: Tensor | None = None,
    *,
    tokens_pad_index: int = 0,
    labels_pad_index: int = IGNORED_LABEL,
    group: ProcessGroup | None = None,
) -> PackedInputs:
    """Pad one row of documents; the padding is a document of its own, so that nothing else changes.

    Args:
        tokens: `[1, N]`.
        cu_seqlens: `[documents + 1]`, from 0 to N.
        labels: `[1, N]`, already shifted (`shift_labels` with `cu_seqlens`).

    Raises:
        ValueError: there is more than one row, or `cu_seqlens` does not rise from 0 to N.
    """
    _check_shapes(tokens, labels=labels)
    length = tokens.shape[1]
    ends = cu_seqlens.tolist()
    if len(tokens) != 1:
        raise UserError(f"documents are packed into one row, got tokens of shape {tuple(tokens.shape)}")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length or any(b <= a for a, b in pairwise(ends)):
        raise UserError(f"cu_seqlens must rise from 0 to the {length} tokens of the row, got {ends}")
    tokens = pad_tensor(tokens, tokens_pad_index, group=group)
    if tokens.shape[1] > length:
        ends.append(tokens.shape[1])
    padded = torch.tensor(ends, dtype=torch.int32, device=cu_seqlens.device)
    lengths = padded.diff()
    positions = torch.cat([torch.arange(count, device=tokens.device) for count in lengths.tolist()])
    return PackedInputs(
        tokens,
        padded,
        int(lengths.max()),
        None if labels is None else pad_tensor(labels, labels_pad_index, group=group),
        positions.unsqueeze(0),
    )


def _ranks(group: ProcessGroup | None) -> int:
    group = sequence_group(group)
    return 1 if group is None else group.size()


def _check_dim(name: str, x: object, dim: object) -> None:
    if not isinstance(x, Tensor):
        raise UserError(f"{name} must be a tensor, got {type(x).__name__}")
    check_number("dim", dim, int)
    if not -x.ndim <= operator.index(dim) < x.ndim:  # type: ignore[arg-type]  # NumPy's integers are integers too
        raise UserError(f"there is no dim {dim} in {name} of shape {tuple(x.shape)}")


def _check_shapes(tokens: Tensor, **others: Tensor | None) -> None:
    if not isinstance(tokens, Tensor):
        raise UserError(f"tokens must be a tensor, got {type(tokens).__name__}")
    if tokens.ndim != 2:
        raise UserError(f"tokens must have two dims [rows, length], got shape {tuple(tokens.shape)}")
    for name, other in others.items():
        if other is None:
            continue
        if not isinstance(other, Tensor):
            raise UserError(f"{name} must be a tensor or None, got {type(other).__name__}")
        rows_fit = name == "position_ids" and len(other) == 1
        if other.shape != tokens.shape and not (rows_fit and other.shape[1:] == tokens.shape[1:]):
            raise UserError(f"{name} has shape {tuple(other.shape)}, tokens have {tuple(tokens.shape)}")
