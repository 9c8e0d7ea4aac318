"""Rows that context parallelism could trip over: every length around its chunks, rows without tokens or without loss.

What one process computes is proven elsewhere to be what transformers computes. The model has a single key-value head,
fewer than ranks, and RoPE whose base depends on the length of a row, which filling must not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config import MicroBatchSettings, ModelConfig, OptimizerSettings, RopeScaling
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import MegatronTrainStrategy
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, merge_stages, settings, write_tiny

MODEL = ModelConfig(
    **TINY.model_dump()
    | {
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "max_position_embeddings": 6,
        "rope_scaling": RopeScaling(rope_type="dynamic", factor=4.0),
    }
)


def rows_around_the_chunks(cp: int) -> DataProto:
    """Rows of 1 to 4 cp + 1 tokens, padded left and right in turn; of each the later half is a response."""
    width = 4 * cp + 1
    mask = torch.zeros(width + 1, width, dtype=torch.long)  # the last row has no token at all
    response = torch.zeros_like(mask)
    for row in range(width):
        start = (width - row - 1) if row % 2 else 0
        mask[row, start : start + row + 1] = 1
        response[row, start + max(1, (row + 1) // 2) : start + row + 1] = 1
    response[2 * cp] = 0  # a row that nothing is learned from
    draw = torch.Generator().manual_seed(cp)
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(3, TINY.vocab_size, mask.shape, generator=draw) * mask,
            "attention_mask": mask,
            "response_mask": response,
            "weights": torch.rand(len(mask), width - 1, generator=draw) + 0.5,
        }
    )


def one_loss_token(batch: DataProto) -> DataProto:
    """Of the longest row the last token alone is learned: all ranks but one own none."""
    batch = batch.clone()
    batch["response_mask"].zero_()
    batch["response_mask"][-2, -1] = 1
    return batch


def log_probs_and_entropy(data: DataProto, output: Any) -> dict[str, Tensor]:
    log_probs, entropy = output.log_probs_and_entropy(data["input_ids"], data["attention_mask"])
    return {"log_probs": log_probs, "entropy": entropy}


def loss_of_both(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Through log-probs and entropies, every token with a weight of its own."""
    log_probs, entropy = output.log_probs_and_entropy(data["input_ids"], data["response_mask"])
    weighted = data["weights"] * (log_probs + entropy.square())
    return -weighted.sum() / data.normalizers.tokens, {"entropy": entropy.sum()}


def run_layouts(folder: Path, cp: int, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each layout, on this rank: results per token, and metrics and gradients of two steps."""
    outcomes = []
    for layout in layouts:
        # Weights stay as they are: Adam would enlarge rounding errors in the smallest gradients.
        config = settings(
            folder,
            micro_batch=MicroBatchSettings(rows=9),
            optimizer=OptimizerSettings(lr=1e-12, max_grad_norm=1e9),
            **layout,
        )
        with parallel_groups(config.parallel) as state:
            strategy = MegatronTrainStrategy(config, state)
            strategy.initialize()
            batch = rows_around_the_chunks(cp)
            given = batch if state.is_leader else batch.stub()
            outcome: dict[str, Any] = {
                "results": strategy.forward_step(given, log_probs_and_entropy),
                "steps": [],
            }
            for step_batch in (batch, one_loss_token(batch)):
                given = step_batch if state.is_leader else step_batch.stub()
                metrics = strategy.train_step(given, loss_of_both)
                outcome["steps"].append((metrics, merge_stages(dict(strategy.gradients()))))
            outcomes.append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), MODEL)


@pytest.mark.parametrize("cp", [2, 4])
def test_rows_of_every_length_around_the_chunks(ranks: RankPool, folder: Path, cp: int) -> None:
    ((expected,),) = ranks.run(run_layouts, folder, cp, [{}], world_size=1)
    # Something would be seen: rows beyond the trained length, losses and gradients that are not zero.
    assert all(float(metrics["loss"]) != 0 for metrics, _ in expected["steps"])
    layouts = [{"cp": cp, "cp_comm": cp_comm} for cp_comm in ("a2a", "all_gather", "ring")]
    for rank, outcomes in enumerate(ranks.run(run_layouts, folder, cp, layouts, world_size=cp)):
        for layout, outcome in zip(layouts, outcomes, strict=True):
            assert (outcome["results"] is not None) == (rank == 0)
            for name, actual in (outcome["results"] or {}).items():
                error = (actual - expected["results"][name]).abs().max()
                assert error <= 1e-5, f"{layout} {name}: {error:.2e}"
            for (metrics, gradients), (one_metrics, one_gradients) in zip(
                outcome["steps"], expected["steps"], strict=True
            ):
                for name in ("loss", "entropy", "grad_norm"):
                    assert metrics[name] == pytest.approx(one_metrics[name], rel=1e-5), f"{layout} {name}"
                assert gradients.keys() == one_gradients.keys()
                for name, gradient in one_gradients.items():
                    error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
                    assert error <= 1e-5, f"{layout} {name}: relative error {error:.2e}"
