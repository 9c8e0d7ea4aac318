"""Modes, and the degrees that belong to them."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config import ConfigError, ModelConfig, ParallelSettings, check_parallel

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=4,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("settings", "row", "segment"),
    [
        ({}, 1, 1),
        ({"tp": 4}, 1, 1),
        ({"mode": "msp", "tp": 2, "pp": 3}, 2, 1),
        ({"mode": "fsp", "tp": 4}, 4, 1),
        ({"mode": "isp", "sp": 2, "wp": 4}, 2, 1),
        ({"mode": "isp", "wp": 4}, 1, 1),
        ({"cp": 1, "cp_comm": "ring"}, 1, 1),
        ({"tp": 2, "cp": 2}, 2, 1),
        ({"cp": 3, "cp_comm": "ring"}, 6, 6),
        ({"mode": "fsp", "tp": 2, "cp": 2}, 4, 1),
        ({"mode": "fsp", "tp": 2, "cp": 4, "cp_comm": "all_gather"}, 8, 8),
        # Sequences of 4 tokens, of which each rank has 2, must add up to parts of the row that divide by tp 3.
        ({"mode": "msp", "tp": 3, "cp": 2, "cp_comm": "ring"}, 12, 4),
    ],
)
def test_multiples_that_rows_and_their_segments_are_filled_up_to(
    settings: dict[str, Any], row: int, segment: int
) -> None:
    parallel = ParallelSettings(**settings)
    assert (parallel.row_multiple, parallel.segment_multiple) == (row, segment)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fsp"}, "mode: fsp splits the sequence over tp, which must be more than 1; got tp 1"),
        (
            {"mode": "isp", "tp": 2},
            "tp: mode isp keeps it at 1, got 2; InternEvo's tensor parallel size is sp here: set parallel.sp=2",
        ),
        (
            {"mode": "isp", "cp": 4},
            "cp: mode isp keeps it at 1, got 4; a sequence is split over sp here: set parallel.sp=4",
        ),
        (
            {"mode": "isp", "cp_comm": "ring"},
            "cp_comm: ring has no meaning in mode isp: its ranks exchange heads, a2a",
        ),
        (
            {"cp": 2, "pp": 2, "rank_order": "tp-cp-ep-pp-dp"},
            "rank_order: must end with pp where cp 2 and pp 2 are more than 1, got 'tp-cp-ep-pp-dp'",
        ),
        (
            {"mode": "isp", "sp": 2, "pp": 2, "rank_order": "tp-cp-ep-pp-dp"},
            "rank_order: must end with pp where sp 2 and pp 2 are more than 1, got 'tp-cp-ep-pp-dp'",
        ),
        ({"sp": 2}, "sp: mode mtp keeps it at 1, got 2; a sequence is split over cp here: set parallel.cp=2"),
        (
            {"mode": "fsp", "tp": 2, "sp": 2},
            "sp: mode fsp keeps it at 1, got 2; a sequence is split over tp here: set parallel.tp=2",
        ),
        (
            {"mode": "msp", "tp": 2, "wp": 4},
            "wp: mode msp keeps it at 1, got 4; weights are split over tp here: set parallel.tp=4",
        ),
        ({"mode": "tsp"}, "mode"),
    ],
)
def test_degrees_of_another_mode_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "world_size", "problems"),
    [
        ({"sp": 4, "wp": 2}, 8, []),
        ({"sp": 12, "wp": 4}, 12, []),
        (
            {"sp": 6},
            6,
            ["parallel.sp: 6 neither divides the model's num_key_value_heads 4 nor is a multiple of it; 4 would fit"],
        ),
        ({"sp": 8}, 8, ["parallel.sp: 8 does not divide the model's num_attention_heads 12; 4 would fit"]),
        (
            {"wp": 5},
            10,
            [
                "parallel.wp: 5 does not divide the model's hidden_size 48; 4 would fit",
                "parallel.wp: 5 does not divide the model's vocab_size 96; 4 would fit",
            ],
        ),
        ({"sp": 4, "pp": 2}, 12, ["world_size: 12 is not a multiple of parallel.sp 4 x pp 2 = 8"]),
        (
            {"sp": 2, "wp": 4, "pp": 2},
            12,
            ["parallel.wp: 4 does not divide the ranks of a stage, 12 ranks / pp 2 = 6; 3 would fit"],
        ),
    ],
)
def test_what_a_model_and_a_world_allow(settings: dict[str, Any], world_size: int, problems: list[str]) -> None:
    assert check_parallel(MODEL, ParallelSettings(mode="isp", **settings), world_size) == problems


@pytest.mark.parametrize(
    ("settings", "world_size", "problems"),
    [
        ({"cp": 4}, 8, []),
        ({"tp": 2, "cp": 2, "mode": "fsp"}, 4, []),
        ({"cp": 12}, 12, []),  # three ranks share a key-value head
        ({"tp": 4, "cp": 3}, 12, []),  # each tensor-parallel rank has one, which all three share
        (
            {"cp": 8},
            8,
            [
                "parallel.cp: 8 does not divide the model's num_attention_heads 12; 4 would fit, or cp_comm all_gather "
                "or ring"
            ],
        ),
        (
            {"tp": 2, "cp": 3},
            6,
            [
                "parallel.cp: 3 neither divides the model's num_key_value_heads 4 / tp 2 nor is a multiple of it; "
                "2 would fit, or cp_comm all_gather or ring"
            ],
        ),
        ({"cp": 5, "cp_comm": "ring"}, 5, []),
        ({"tp": 4, "cp": 8, "cp_comm": "all_gather"}, 32, []),
        ({"cp": 2, "tp": 2}, 6, ["world_size: 6 is not a multiple of parallel.tp 2 x pp 1 x cp 2 = 4"]),
    ],
)
def test_what_context_parallelism_needs(settings: dict[str, Any], world_size: int, problems: list[str]) -> None:
    assert check_parallel(MODEL, ParallelSettings(**settings), world_size) == problems
