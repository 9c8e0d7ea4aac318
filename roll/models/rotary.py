"""RoPE from the position of each token (Su et al. 2021), for packed and split sequences alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roll.models.packed_sequence import PackedSequence


class PositionRotaryEmbedding(nn.Module):
    """Takes the place of Megatron-Core's `RotaryEmbedding`, which knows only positions 0, 1, 2, ...

    `GPTModel` asks `get_rotary_seq_len` and passes the answer to `forward`; here the answer is the positions.
    """

    def __init__(self, head_dim: int, base: float) -> None:
        super().__init__()
        self.inverse_frequencies: Tensor
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inverse_frequencies", 1.0 / base**exponents, persistent=False)

    def get_rotary_seq_len(
        self,
        inference_context: object,
        transformer: object,
        transformer_input: object,
        transformer_config: object,
        packed_seq_params: PackedSequence,
    ) -> Tensor:
        """The positions of this rank's tokens, `[T]`."""
        assert packed_seq_params.position_ids is not None
        return packed_seq_params.position_ids

    def forward(self, position_ids: Tensor, **unused: object) -> Tensor:
        """Angles `[T, 1, 1, head_dim]` fp32, the two halves equal (the rotate-half convention)."""
        angles = torch.outer(position_ids.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
