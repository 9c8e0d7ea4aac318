"""From padded rows `[B, S]` to one packed row `[1, T]` and back.

Padding is dropped, the rows' real tokens stand one after the other, and `cu_seqlens` says where each begins. Prompts
padded on the left, responses padded on the right and rows of one token are all the same here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """Rows of a micro-batch without their padding.

    Example: rows `[0 0 5 6]` and `[7 8 9 0]` with masks `[0 0 1 1]` and `[1 1 1 0]`, `multiple_of=4`, give
    input_ids `[5 6 7 8 9 0 0 0]`, position_ids `[0 1 0 1 2 0 1 2]`, cu_seqlens `[0 2 5 8]`. The filling at the end is a
    segment of its own: no real token attends to it, and `unpack` leaves it out.
    """

    input_ids: Tensor
    """`[1, T]` int64."""
    position_ids: Tensor
    """`[1, T]` int64, from 0 in each segment."""
    cu_seqlens: Tensor
    """`[segments + 1]` int32 on CPU: the first token of each segment, then T. No segment is empty."""
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
        following[: self.num_tokens] = shifted[self.mask]
        return following

    def unpack_next(self, values: Tensor) -> Tensor:
        """Per-token results back at their rows: `[T]` to `[B, S-1]`.

        What was computed at token t speaks of token t+1, so it stands at index t; it is zero where token t or t+1 is
        padding. Differentiable.
        """
        rows = values.new_zeros(self.mask.shape)
        rows = rows.masked_scatter(self.mask, values[: self.num_tokens])
        return torch.where(self.mask[:, :-1] & self.mask[:, 1:], rows[:, :-1], 0.0)


def pack_rows(input_ids: Tensor, attention_mask: Tensor, *, multiple_of: int = 1) -> PackedRows:
    """Pack `[B, S]` rows into `[1, T]`, T filled up with id 0 to a multiple of `multiple_of` (at least one token)."""
    mask = attention_mask.bool()
    lengths = mask.sum(dim=1)
    lengths = lengths[lengths > 0]
    filling = -int(lengths.sum()) % multiple_of
    if not len(lengths) and not filling:
        filling = multiple_of  # Not even one token is real; the model still takes part in every collective.
    if filling:
        lengths = torch.cat([lengths, lengths.new_tensor([filling])])
    ends = lengths.cumsum(0)
    starts = ends - lengths
    total = int(ends[-1])
    ids = input_ids.new_zeros(total)
    ids[: total - filling] = input_ids[mask]
    positions = torch.arange(total, device=input_ids.device) - starts.repeat_interleave(lengths)
    cu_seqlens = torch.cat([starts, ends[-1:]]).to(dtype=torch.int32, device="cpu")
    return PackedRows(ids.unsqueeze(0), positions.unsqueeze(0), cu_seqlens, mask)


def check_divides(length: int, shards: int) -> None:
    """Refuse rows that cannot be cut into equal shards.

    Raises:
        ValueError: names the length, the shards and the next length that fits.
    """
    if length % shards:
        padded = -(-length // shards) * shards
        raise ValueError(
            f"{length} tokens of a row do not split over {shards} ranks of the sequence; {padded} would fit"
        )
