"""RoPE's angles and their scalings, against transformers' own, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from roll.config import ModelConfig, RopeScaling
from roll.data.packing import PackedRows, pack_rows
from roll.models.packed_sequence import PackedSequence
from roll.models.rotary import PositionRotaryEmbedding

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    LLAMA3,
]
TRAINED, HEAD, THETA = 64, 16, 1000.0


def model_of(scaling: dict[str, Any] | None) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=8,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=TRAINED,
        rope_theta=THETA,
        rope_scaling=None if scaling is None else RopeScaling(**scaling),
    )


def packed(*lengths: int) -> PackedSequence:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    rows: PackedRows = pack_rows(torch.zeros_like(mask), mask)
    return PackedSequence.of(rows)


def angles(scaling: dict[str, Any] | None, *lengths: int) -> torch.Tensor:
    """`[T, d]`."""
    rotary = PositionRotaryEmbedding(model_of(scaling))
    sequence = rotary.get_rotary_seq_len(None, None, None, None, packed(*lengths))
    return rotary(sequence)[:, 0, 0]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("length", [7, TRAINED, TRAINED + 1, 160])
def test_one_sequence_turns_as_in_transformers(scaling: dict[str, Any] | None, length: int) -> None:
    rope = {"rope_theta": THETA, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=TRAINED, rope_parameters=rope
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length).unsqueeze(0))
    ours = angles(scaling, length)
    torch.testing.assert_close(ours.cos(), cos[0], rtol=0, atol=2e-5)  # angles up to 160 in fp32
    torch.testing.assert_close(ours.sin(), sin[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_packed_row_turns_as_its_sequences_alone(scaling: dict[str, Any] | None) -> None:
    lengths = (70, 3, 160, TRAINED, 70)
    alone = torch.cat([angles(scaling, length) for length in lengths])
    assert torch.equal(angles(scaling, *lengths), alone)


def test_dynamic_leaves_what_fits_the_trained_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 1.1}
    assert torch.equal(angles(scaling, 7, TRAINED), angles(None, 7, TRAINED))
    assert not torch.equal(angles(scaling, TRAINED + 1), angles(None, TRAINED + 1))


def test_by_hand() -> None:
    pairs = np.arange(HEAD // 2)
    plain = THETA ** (-2 * pairs / HEAD)

    def last(scaling: dict[str, Any] | None, length: int) -> np.ndarray:
        return angles(scaling, length)[-1, : HEAD // 2].double().numpy() / (length - 1)

    np.testing.assert_allclose(last(None, 11), plain, rtol=1e-6)
    np.testing.assert_allclose(last({"rope_type": "linear", "factor": 4.0}, 11), plain / 4, rtol=1e-6)
    # Twice the trained length at factor 3: 3 * 2 - 2 = 4.
    base = THETA * 4 ** (HEAD / (HEAD - 2))
    np.testing.assert_allclose(
        last({"rope_type": "dynamic", "factor": 3.0}, 128), base ** (-2 * pairs / HEAD), rtol=1e-6
    )
    # llama3 with 32 positions: wavelengths below 32 / 4 stay, those above 32 / 1 are 8 times as long.
    expected = []
    for frequency in plain:
        length = 2 * math.pi / frequency
        between = (32 / length - 1) / (4 - 1)
        slowed = (1 - between) * frequency / 8 + between * frequency
        expected.append(frequency if length < 8 else frequency / 8 if length > 32 else slowed)
    np.testing.assert_allclose(last(LLAMA3, 11), expected, rtol=1e-6)
    lengths = 2 * np.pi / plain
    assert (lengths < 8).any()
    assert (lengths > 32).any()
    assert ((lengths > 8) & (lengths < 32)).any()
