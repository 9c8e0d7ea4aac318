"""Every shape that InternEvo's document prints for InternLM2, in each mode, as golden rows.

The right-hand sides are the document's own formulas; only `num_heads` and the like are written shorter. The model has
the biases of wqkv and wo that the document prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll.checkpoint.hf import load_weights
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ParallelSettings
from roll.data.sequence_split import SequenceSplit
from roll.models.gpt import build_model
from roll.models.inspection import forward_shapes, local_shapes
from roll.models.packed_sequence import PackedSequence
from roll.parallel.state import parallel_groups
from tests.rank_pool import RankPool
from tests.strategies.tiny import BIASED

vocab_size, hidden_size, ffn = BIASED.vocab_size, BIASED.hidden_size, BIASED.intermediate_size
heads, kv_heads, head_dim = BIASED.num_attention_heads, BIASED.num_key_value_heads, BIASED.head_dim
micro_bsz, seq_len = 2, 8
total = micro_bsz * seq_len
qkv = hidden_size + 2 * hidden_size // heads * kv_heads
group = heads // kv_heads + 2

# The document's example row: sentences of 4, 7 and 5 tokens.
CU_SEQLENS = torch.tensor([0, 4, 11, 16], dtype=torch.int32)
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4])


def inspected(settings: dict[str, Any], parallel_output: bool) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    parallel = ParallelSettings(**settings)
    with parallel_groups(parallel) as state:
        gpt = build_model(BIASED, parallel, state, dtype=torch.float32, head="lm").eval()
        load_weights(gpt, tensor_source(Path(), BIASED, init="random", head="lm", seed=0), state)
        packed = PackedSequence.packed(CU_SEQLENS, SequenceSplit(parallel, state.cp.rank()))
        assert torch.equal(packed.position_ids, packed.own(POSITIONS.unsqueeze(0))[0])
        ids = packed.own(torch.arange(total).unsqueeze(0))
        return local_shapes(gpt, state), forward_shapes(gpt, packed, ids, parallel_output=parallel_output)


@pytest.mark.parametrize(("world_size", "sp_size", "wp_size"), [(2, 2, 1), (4, 2, 4), (4, 4, 2)])
def test_isp(ranks: RankPool, world_size: int, sp_size: int, wp_size: int) -> None:
    settings = {"mode": "isp", "sp": sp_size, "wp": wp_size}
    for weights, steps in ranks.run(inspected, settings, True, world_size=world_size):
        layer = "model.layers.0."
        assert weights["model.tok_embeddings.weight"] == (vocab_size, hidden_size // wp_size)
        assert weights[f"{layer}attention.wqkv.weight"] == (qkv // wp_size, hidden_size)
        assert weights[f"{layer}attention.wqkv.bias"] == (qkv // wp_size,)
        assert weights[f"{layer}attention.wo.weight"] == (hidden_size // wp_size, hidden_size)
        assert weights[f"{layer}attention.wo.bias"] == (hidden_size // wp_size,)
        assert weights[f"{layer}feed_forward.w1.weight"] == (ffn // wp_size, hidden_size)
        assert weights[f"{layer}feed_forward.w2.weight"] == (hidden_size // wp_size, ffn)
        assert weights[f"{layer}feed_forward.w3.weight"] == (ffn // wp_size, hidden_size)
        assert weights["output.weight"] == (vocab_size // wp_size, hidden_size)
        # The document shows a norm as its module prints it, whole; here it is split like everything else.
        assert weights["model.norm.weight"] == (hidden_size // wp_size,)

        own_kv_heads = max(kv_heads // sp_size, 1)
        assert steps == [
            ("input_ids", (1, total // sp_size)),
            ("tok_embeddings", (1, total // sp_size, hidden_size)),
            ("wqkv", (1, total // sp_size, qkv)),
            ("qkv by head", (1, total // sp_size, kv_heads, group, head_dim)),
            ("q", (1, total // sp_size, heads, head_dim)),
            ("k", (1, total // sp_size, kv_heads, head_dim)),
            ("v", (1, total // sp_size, kv_heads, head_dim)),
            ("kv", (1, total // sp_size, 2, kv_heads, head_dim)),
            ("exchanged q", (1, total, heads // sp_size, head_dim)),
            ("exchanged kv", (1, total, 2, own_kv_heads, head_dim)),
            ("exchanged context", (1, total, heads // sp_size, head_dim)),
            ("context", (1, total // sp_size, heads, head_dim)),
            ("wo", (1, total // sp_size, hidden_size)),
            ("w1", (1, total // sp_size, ffn)),
            ("w3", (1, total // sp_size, ffn)),
            ("w2", (1, total // sp_size, hidden_size)),
            ("norm", (1, total // sp_size, hidden_size)),
            ("output", (1, total // sp_size, vocab_size)),
        ]


@pytest.mark.parametrize("parallel_output", [False, True])
@pytest.mark.parametrize(("mode", "tp_size"), [("mtp", 2), ("msp", 4), ("fsp", 2)])
def test_mtp_msp_fsp(ranks: RankPool, mode: str, tp_size: int, parallel_output: bool) -> None:
    for weights, steps in ranks.run(inspected, {"mode": mode, "tp": tp_size}, parallel_output, world_size=tp_size):
        layer = "model.layers.0."
        assert weights["model.tok_embeddings.weight"] == (vocab_size, hidden_size // tp_size)
        assert weights[f"{layer}attention.wqkv.weight"] == (qkv // tp_size, hidden_size)
        assert weights[f"{layer}attention.wqkv.bias"] == (qkv // tp_size,)
        assert weights[f"{layer}attention.wo.weight"] == (hidden_size, hidden_size // tp_size)
        # The document prints no bias of wo here, but a model has the same biases in every mode: whole on every rank.
        assert weights[f"{layer}attention.wo.bias"] == (hidden_size,)
        assert weights[f"{layer}feed_forward.w1.weight"] == (ffn // tp_size, hidden_size)
        assert weights[f"{layer}feed_forward.w2.weight"] == (hidden_size, ffn // tp_size)
        assert weights[f"{layer}feed_forward.w3.weight"] == (ffn // tp_size, hidden_size)
        assert weights["output.weight"] == (vocab_size // tp_size, hidden_size)
        assert weights["model.norm.weight"] == (hidden_size,)

        between = total if mode == "mtp" else total // tp_size  # Tokens of a rank outside attention and MLP.
        assert steps == [
            ("input_ids", (1, total)),
            ("tok_embeddings", (1, between, hidden_size)),
            ("wqkv", (1, total, qkv // tp_size)),
            ("qkv by head", (1, total, kv_heads // tp_size, group, head_dim)),
            ("q", (1, total, heads // tp_size, head_dim)),
            ("k", (1, total, kv_heads // tp_size, head_dim)),
            ("v", (1, total, kv_heads // tp_size, head_dim)),
            ("kv", (1, total, 2, kv_heads // tp_size, head_dim)),
            ("context", (1, total, heads // tp_size, head_dim)),
            ("wo", (1, between, hidden_size)),
            ("w1", (1, total, ffn // tp_size)),
            ("w3", (1, total, ffn // tp_size)),
            ("w2", (1, between, hidden_size)),
            ("norm", (1, between, hidden_size)),
            # The document prints the gathered vocabulary; split it is smaller, and enough for log-probs.
            ("output", (1, total, vocab_size // tp_size if parallel_output else vocab_size)),
        ]
