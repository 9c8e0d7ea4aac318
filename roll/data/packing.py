"""From padded rows `[B, S]` to one packed row `[1, T]` and back.

Padding is dropped, the rows' real tokens stand one after the other, and `cu_seqlens` says where each begins. Prompts
padded on the left, responses padded on the right and rows of one token are all the same here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roll.errors import UserError


@dataclass(frozen=True)
class PackedRows:
    """Rows of a micro-batch without their padding.

    Example: rows `[0 0 5 6]` and `[7 8 9 0]` with masks `[0 0 1 1]` and `[1 1 1 0]`, `multiple_of=4`, give
    input_ids `[5 6 7 8 9 0 0 0]`, position_ids `[0 1 0 1 2 0 1 2]`, cu_seqlens `[0 2 5 8]`. The filling at the end is a
    segment of its own: no real token attends to it, and `unpack` leaves it out.

    With `segment_multiple_of=4` the segments are filled up too: `[5 6 0 0 7 8 9 0]`, cu_seqlens `[0 4 8]`. A filling
    stands behind its segment's tokens, which under the causal mask do not see it.
    """

    input_ids: Tensor
    """`[1, T]` int64."""
    position_ids: Tensor
    """`[1, T]` int64, from 0 in each segment."""
    cu_seqlens: Tensor
    """`[segments + 1]` int32 on CPU: the first token of each segment, then T. No segment is empty."""
    segment_lengths: Tensor
    """`[segments]` int64 on CPU: tokens of each segment without what fills it up."""
    places: Tensor
    """`[num_tokens]` int64: where each real token stands in the packed row, in the order of the rows."""
    mask: Tensor
    """`[B, S]` bool: the real tokens."""

    @property
    def max_seqlen(self) -> int:
        return int(self.cu_seqlens.diff().max())

    @property
    def num_tokens(self) -> int:
        """Real tokens, without the filling."""
        return int(self.mask.sum())

    def next_tokens(self, input_ids: Tensor) -> Tensor:
        """`[T]`: at each packed token the id that follows it in its row, 0 where the row (or the packing) ends."""
        shifted = torch.zeros_like(input_ids)
        shifted[:, :-1] = torch.where(self.mask[:, 1:], input_ids[:, 1:], 0)
        following = input_ids.new_zeros(self.input_ids.shape[1])
        following[self.places] = shifted[self.mask]
        return following

    def unpack(self, values: Tensor) -> Tensor:
        """Values of all tokens at their rows: `[T, ...]` to `[B, S, ...]`, zero at padding. Differentiable."""
        rows = values.new_zeros(*self.mask.shape, *values.shape[1:])
        mask = self.mask.view(*self.mask.shape, *[1] * (values.ndim - 1))
        return rows.masked_scatter(mask, values[self.places])

    def unpack_next(self, values: Tensor) -> Tensor:
        """Per-token results back at their rows: `[T]` to `[B, S-1]`.

        What was computed at token t speaks of token t+1, so it stands at index t; it is zero where token t or t+1 is
        padding. Differentiable.
        """
        return torch.where(self.mask[:, :-1] & self.mask[:, 1:], self.unpack(values)[:, :-1], 0.0)


def pack_rows(
    input_ids: Tensor, attention_mask: Tensor, *, multiple_of: int = 1, segment_multiple_of: int = 1
) -> PackedRows:
    """Pack `[B, S]` rows into `[1, T]`, filled up with id 0 (to at least one token) as `align_segments` says."""
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1).cpu()
    aligned = align_segments(lengths[lengths > 0], multiple_of=multiple_of, segment_multiple_of=segment_multiple_of)
    cu_seqlens, places = aligned.cu_seqlens, aligned.places.to(input_ids.device)
    total = int(cu_seqlens[-1])
    ids = input_ids.new_zeros(total)
    ids[places] = input_ids[mask]
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff()).to(input_ids.device)
    positions = torch.arange(total, device=input_ids.device) - starts
    return PackedRows(ids.unsqueeze(0), positions.unsqueeze(0), cu_seqlens, aligned.lengths, places, mask)


@dataclass(frozen=True)
class AlignedSegments:
    """Segments whose lengths, and whose sum, are multiples of what the ranks that share a row need."""

    cu_seqlens: Tensor
    """`[segments + 1]` int32 on CPU."""
    lengths: Tensor
    """`[segments]` int64 on CPU: tokens of each segment without what fills it up."""
    places: Tensor
    """`[sum of the given lengths]` int64 on CPU: where each given token stands."""


def align_segments(lengths: Tensor, *, multiple_of: int, segment_multiple_of: int = 1) -> AlignedSegments:
    """Fill up segments of these lengths, none of them 0, each behind its tokens, and the row with a last segment.

    The only place that decides where padding goes. A row has at least one segment, if only of filling.

    Args:
        lengths: `[segments]` int64.
        multiple_of: what the row's length becomes a multiple of; itself a multiple of `segment_multiple_of`.
        segment_multiple_of: what the length of each segment becomes a multiple of.
    """
    assert multiple_of % segment_multiple_of == 0
    filled = lengths + -lengths % segment_multiple_of
    filling = -int(filled.sum()) % multiple_of
    if not len(lengths) and not filling:
        filling = multiple_of  # Not even one token is real; the model still takes part in every collective.
    given_starts = (filled.cumsum(0) - filled).repeat_interleave(lengths)
    within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    if filling:
        lengths, filled = (torch.cat([x, x.new_tensor([filling])]) for x in (lengths, filled))
    cu_seqlens = torch.cat([filled.new_zeros(1), filled.cumsum(0)]).to(torch.int32)
    return AlignedSegments(cu_seqlens, lengths, given_starts + within)


def check_divides(length: int, shards: int, parts: str = "ranks of the sequence") -> None:
    """Refuse rows (or sequences) that cannot be cut into equal shards.

    Raises:
        ValueError: names the length, the shards and the next length that fits.
    """
    if length % shards:
        padded = -(-length // shards) * shards
        raise UserError(f"{length} tokens of a row do not split over {shards} {parts}; {padded} would fit")
