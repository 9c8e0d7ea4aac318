"""RoPE from the position of each token (Su et al. 2021), for packed and split sequences alike, and its scalings.

A pair i of a head of size d turns by position * f(i), where f(i) = base^(-2i/d). The scalings change f:

- linear (kaiokendev 2023): f / factor.
- dynamic (NTK-aware, bloc97 and emozilla 2023), for a sequence of L tokens beyond the trained length M: the base is
  multiplied by (factor * L / M - (factor - 1)) ^ (d / (d - 2)).
- llama3 (Llama 3.1's apply_scaling): f / factor where the wavelength 2 pi / f is above M / low_freq_factor, f as it is
  where it is below M / high_freq_factor, and linear in M / wavelength between the two.

They equal `modeling_rope_utils.py` of transformers, and `modeling_internlm2.py` of internlm/internlm2-7b, on one
sequence. On several those let the longest decide dynamic's base, here each segment has the base of its own length.
Generation token by token is another matter: keys in a cache keep the base they were made with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from roll.config import ModelConfig, RopeScaling
from roll.models.packed_sequence import PackedSequence


class PositionRotaryEmbedding(nn.Module):
    """Takes the place of Megatron-Core's `RotaryEmbedding`, which knows only positions 0, 1, 2, ...

    `GPTModel` asks `get_rotary_seq_len` and passes the answer to `forward`; here the answer is the packed sequence,
    which knows the positions.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        self.exponents: Tensor
        self.frequencies: Tensor
        exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim
        frequencies = 1.0 / model.rope_theta**exponents
        scaling = model.rope_scaling
        if scaling is not None and scaling.rope_type == "linear":
            frequencies = frequencies / scaling.factor
        elif scaling is not None and scaling.rope_type == "llama3":
            frequencies = llama3_frequencies(frequencies, scaling)
        self.register_buffer("exponents", exponents, persistent=False)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def get_rotary_seq_len(
        self,
        inference_context: object,
        transformer: object,
        transformer_input: object,
        transformer_config: object,
        packed_seq_params: PackedSequence,
    ) -> PackedSequence:
        """What `forward` needs."""
        return packed_seq_params

    def forward(self, packed: PackedSequence, **unused: object) -> Tensor:
        """Angles `[T, 1, 1, head_dim]` fp32 of this rank's tokens, the two halves equal (rotate-half convention)."""
        frequencies = self.frequencies
        if self.model.rope_scaling is not None and self.model.rope_scaling.rope_type == "dynamic":
            frequencies = 1.0 / self._bases(packed.segment_lengths).unsqueeze(1) ** self.exponents
        angles = packed.position_ids.float().unsqueeze(1) * frequencies
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def _bases(self, lengths: Tensor) -> Tensor:
        """The base `[T]` fp32 that dynamic scaling gives to tokens of segments of these lengths `[T]`."""
        model = self.model
        assert model.rope_scaling is not None
        trained, factor = model.max_position_embeddings, model.rope_scaling.factor
        # In fp64, so that a segment within the trained length has the base itself, to the bit.
        growth = factor * lengths.clamp(min=trained).double() / trained - (factor - 1)
        return (model.rope_theta * growth ** (model.head_dim / (model.head_dim - 2))).float()


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's slowed frequencies `[d/2]`."""
    low, high, trained = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    assert low is not None and high is not None and trained is not None
    turns = trained * frequencies / (2 * math.pi)  # in the trained context; M / wavelength above
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
