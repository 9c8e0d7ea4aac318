"""A model small enough for every test, batches that exercise padding, and what ranks compute with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll.config import MicroBatchSettings, ModelConfig, OptimizerSettings, ParallelSettings, StrategySettings
from roll.protocol import DataProto

# Non-square everywhere, so that a missing transpose cannot hide.
TINY = ModelConfig(
    vocab_size=40,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=64,
    initializer_range=0.15,  # Large, so that logits and gradients are far from zero.
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
BIASED = TINY.model_copy(update={"bias": True})
"""The same with biases of wqkv and wo."""
# Clipping and the step itself must not disturb what is compared.
OPTIMIZER = OptimizerSettings(lr=1e-3, max_grad_norm=1e9)


def write_tiny(folder: Path, model: ModelConfig = TINY) -> Path:
    """A folder with the config only; weights are drawn from the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.to_hf_dict()))
    return folder


def settings(folder: Path, name: str = "megatron_train", **changes: Any) -> StrategySettings:
    parallel = {key: changes.pop(key) for key in ("mode", "tp", "pp", "sp", "wp", "cp", "cp_comm") if key in changes}
    base: dict[str, Any] = {
        "name": name,
        "model_path": folder,
        "init": "random",
        "seed": 7,
        "parallel": ParallelSettings(**parallel),
        "micro_batch": MicroBatchSettings(rows=2),
        "optimizer": None if name == "megatron_infer" else OPTIMIZER,
        "token_chunk": 8,  # Smaller than a micro-batch, so that chunks have borders.
    }
    return StrategySettings(**(base | changes))


def make_batch(rows: int = 6, width: int = 12, seed: int = 0) -> DataProto:
    """Rows of unequal length: padded left, right and both, one of a single token, one of full width."""
    generator = torch.Generator().manual_seed(seed)
    spans = [(3, 9), (0, 7), (4, 12), (5, 6), (0, 12), (2, 11), (0, 2), (1, 12)]
    assert rows <= len(spans)
    mask = torch.zeros(rows, width, dtype=torch.long)
    response = torch.zeros_like(mask)
    for row, (start, end) in enumerate(spans[:rows]):
        mask[row, start:end] = 1
        response[row, start + max(1, (end - start) // 2) : end] = 1
    ids = torch.randint(3, TINY.vocab_size, (rows, width), generator=generator)
    tensors = {
        "input_ids": torch.where(mask.bool(), ids, 0),
        "attention_mask": mask,
        "response_mask": response,
        "weights": torch.rand(rows, width - 1, generator=generator),
    }
    return DataProto.from_dict(tensors)


def share_of(batch: DataProto, dp_rank: int, dp_size: int) -> DataProto:
    return batch.chunk(dp_size)[dp_rank]


def weighted_nll(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss in which every response token counts differently, so that no misplaced token can hide."""
    mask = data["response_mask"][:, 1:]
    log_probs = output.log_probs(data["input_ids"], data["response_mask"])
    loss = -(log_probs * data["weights"] * mask).sum() / data.normalizers.tokens
    return loss, {"tokens": mask.sum()}


def weighted_value_error(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mask = data["response_mask"][:, 1:]
    values = output.values(data["response_mask"])
    return ((values - data["weights"]).square() * mask).sum() / data.normalizers.tokens, {}


def merge_stages(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """One dict of named tensors from the dicts of all ranks; equal names must hold equal tensors on all of them."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {name: tensor.detach().clone() for name, tensor in parts.items()})
    merged: dict[str, Tensor] = {}
    for part in gathered:
        for name, tensor in part.items():
            if name in merged:
                torch.testing.assert_close(tensor, merged[name], rtol=0, atol=0)
            merged[name] = tensor
    return merged
