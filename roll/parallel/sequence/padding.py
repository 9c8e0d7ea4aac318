"""Padding sequences so that they divide, splitting them, and shifting their labels.

In this order: labels are shifted over the whole sequence, then everything is padded, then split. A label that is
shifted after the split is lost at the end of every part.

Legend: b rows, N tokens of a row, n ranks of the sequence-parallel group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

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
            raise ValueError(f"cu_seqlens must rise from 0 to the {labels.numel()} labels, got {bounds}")
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
        raise ValueError(
            f"dim {dim} of {tuple(x.shape)} does not divide by the {group.size()} ranks that share a sequence: "
            "pad_for_sequence_parallel first"
        )
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


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


def split_for_sequence_parallel(
    tokens: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's part of every row, `[b, N/n]` each. Labels have been shifted before; the attention mask stays whole.

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
        raise ValueError(f"documents are packed into one row, got tokens of shape {tuple(tokens.shape)}")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length or any(b <= a for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens must rise from 0 to the {length} tokens of the row, got {ends}")
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


def _check_shapes(tokens: Tensor, **others: Tensor | None) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have two dims [rows, length], got shape {tuple(tokens.shape)}")
    for name, other in others.items():
        if other is None:
            continue
        rows_fit = name == "position_ids" and len(other) == 1
        if other.shape != tokens.shape and not (rows_fit and other.shape[1:] == tokens.shape[1:]):
            raise ValueError(f"{name} has shape {tuple(other.shape)}, tokens have {tuple(tokens.shape)}")
