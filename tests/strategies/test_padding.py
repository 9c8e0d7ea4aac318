"""A tokenizer without a pad token: rows are filled with its end token, and every result is what a pad token gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.config import ParallelSettings
from roll.data.prompts import encode_prompts
from roll.data.tasks import TaskItem
from roll.data.tokenizer import build_char_tokenizer, padding_id
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.generation.serving import engine_of, model_of, requests
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, settings, weighted_nll, write_tiny

MODEL = TINY.model_copy(update={"pad_token_id": None})
END = 2
PROMPTS = ["1+2=", "=", "10+20=", "7-"]


def without_a_pad_token() -> PreTrainedTokenizerBase:
    tokenizer = build_char_tokenizer("0123456789 +-=")
    tokenizer.pad_token = None
    return tokenizer


def prompts(tokenizer: PreTrainedTokenizerBase) -> DataProto:
    items = [TaskItem(prompt, "0", {"question": prompt, "answer": "0", "metadata": {}}) for prompt in PROMPTS]
    return encode_prompts(items, tokenizer, max_prompt_tokens=8)


def trained_batch(padding: int) -> DataProto:
    """Prompts and responses, some of which end with a real end token, others without one."""
    asked = prompts(build_char_tokenizer("0123456789 +-="))
    responses = torch.tensor([[5, 6, END, 0], [END, 0, 0, 0], [7, 8, 9, 10], [9, END, 0, 0]])
    real = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    mask = torch.cat([asked["attention_mask"], real], dim=1)
    ids = torch.cat([asked["input_ids"], responses], dim=1)
    return DataProto.from_dict(
        {
            "input_ids": torch.where(mask.bool(), ids, padding),
            "attention_mask": mask,
            "response_mask": torch.cat([torch.zeros_like(asked["attention_mask"]), real], dim=1),
            "weights": torch.rand(4, 11, generator=torch.Generator().manual_seed(1)),
        }
    )


def test_the_id_that_fills_rows() -> None:
    tokenizer = build_char_tokenizer("01")
    assert padding_id(tokenizer) == tokenizer.pad_token_id == 0
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == END
    assert tokenizer.pad_token is None, "the tokenizer is as it was"
    tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0


def test_prompts_are_filled_with_the_end_token() -> None:
    ours, theirs = prompts(without_a_pad_token()), prompts(build_char_tokenizer("0123456789 +-="))
    assert ours["input_ids"][1].tolist() == [END] * 7 + [17]
    assert torch.equal(ours["attention_mask"], theirs["attention_mask"])
    real = theirs["attention_mask"].bool()
    assert torch.equal(ours["input_ids"][real], theirs["input_ids"][real])


def results(strategy: Any, padding: int) -> dict[str, Tensor]:
    """Log-probs, entropies, the loss of a step, its gradients, and the weights after it."""
    batch = trained_batch(padding)

    def look_up(data: DataProto, output: Any) -> dict[str, Tensor]:
        log_probs, entropy = output.log_probs_and_entropy(data["input_ids"], data["response_mask"])
        return {"log_probs": log_probs, "entropy": entropy}

    found = {name: x.clone() for name, x in strategy.forward_step(batch, look_up).items()}
    metrics = strategy.train_step(batch, weighted_nll)
    found |= {f"gradient of {name}": gradient.clone() for name, gradient in strategy.gradients()}
    found |= {name: x.clone() for bucket in strategy.model_update(1 << 30) for name, x in bucket.items()}
    return found | {"loss": torch.tensor(metrics["loss"]), "norm": torch.tensor(metrics["grad_norm"])}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, tensor in theirs.items():
        assert tensor.any(), name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_generation_is_the_same(tmp_path: Path, temperature: float | None) -> None:
    model = model_of(write_tiny(tmp_path / "tiny", MODEL))
    rows = zip(*(prompts(without_a_pad_token())[name] for name in ("input_ids", "attention_mask")), strict=True)
    asked = requests(
        [row[mask.bool()].tolist() for row, mask in rows], temperature=temperature, ends=(END,), length=24, seed=5
    )
    answers = []
    for tokenizer in (build_char_tokenizer("0123456789 +-="), without_a_pad_token()):
        engine = engine_of(model, max_tokens=32)
        engine.model = replace(engine.model, pad_token_id=padding_id(tokenizer))
        answers.append(list(engine.generate(asked)))
    theirs, ours = answers
    assert ours == theirs
    if temperature is not None:
        assert min(len(response.token_ids) for response in theirs) < 24, "no response ended: nothing was filled"


def test_the_reference_computes_and_learns_the_same(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", MODEL)
    found = []
    for padding in (0, END):
        strategy = HfStrategy(settings(folder, "hf"))
        strategy.initialize()
        found.append(results(strategy, padding))
    assert_equal(found[1], found[0])


def on_megatron(folder: Path, padding: int) -> dict[str, Tensor]:
    with parallel_groups(ParallelSettings()) as state:
        strategy = MegatronTrainStrategy(settings(folder), state)
        strategy.initialize()
        return results(strategy, padding)


def both_on_megatron(folder: Path) -> list[dict[str, Tensor]]:
    return [on_megatron(folder, padding) for padding in (0, END)]


def test_megatron_computes_and_learns_the_same(ranks: RankPool, tmp_path: Path) -> None:
    ((theirs, ours),) = ranks.run(both_on_megatron, write_tiny(tmp_path / "tiny", MODEL), world_size=1)
    assert_equal(ours, theirs)
