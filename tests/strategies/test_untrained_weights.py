"""Weights whose rule says that they are not trained: no gradient, no optimizer, no change; checkpoints keep them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from roll.models.hf_mapping import mapped_parameters
from roll.models.weight_rules import RULES, is_trained
from roll.parallel.state import parallel_groups
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, make_batch, merge_stages, settings, weighted_nll, write_tiny

LAYER = "decoder.layers.{n}."
# One weight that each mode splits in another way, one whole on every rank, and w1 with w3.
UNTRAINED = (
    "embedding.weight",
    LAYER + "self_attention.linear_qkv.weight",
    LAYER + "pre_mlp_layernorm.weight",
    LAYER + "mlp.linear_fc1.weight",
    LAYER + "mlp.linear_fc1.w1",
    LAYER + "mlp.linear_fc1.w3",
)
KEPT = ("tok_embeddings", "wqkv", "ffn_norm", "w1", "w3")
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"mode": "msp", "tp": 2},
    {"mode": "fsp", "tp": 2},
    {"mode": "isp", "sp": 2, "wp": 2},
    {"pp": 2},
    {"tp": 2, "dtype": "bfloat16"},
    {"mode": "isp", "wp": 2, "dtype": "bfloat16"},
]
BF16 = 0.1
"""Numbers have 8 bits, and gradients pass four layers: 0.04 of the largest were measured. A wrong one is off by 1."""
TOTAL = 40 * 48 * 2 + 48 + 4 * (48 * 2 + 96 * 48 + 48 * 48 + 3 * 48 * 80)  # numbers in TINY
NUMBERS = 40 * 48 + 4 * (96 * 48 + 48 + 2 * 48 * 80)  # of them in KEPT


@contextmanager
def some_untrained() -> Iterator[None]:
    with patch.dict(RULES, {name: replace(RULES[name], trained=False) for name in UNTRAINED}):  # type: ignore[arg-type]
        yield


def is_kept(name: str) -> bool:
    return any(f".{part}." in name for part in KEPT)


def weights_of(strategy: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for bucket in strategy.model_update(1 << 12) for name, x in bucket.items()}


def step(strategy: Any, batch: Any) -> dict[str, Any]:
    before = weights_of(strategy)
    metrics = strategy.train_step(batch, weighted_nll)
    return {
        "before": before,
        "grad_norm": metrics["grad_norm"],
        "gradients": {name: x.detach().clone() for name, x in strategy.gradients()},
        "after": weights_of(strategy),
    }


def step_of_ranks(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    config = settings(folder, **layout)
    with some_untrained(), parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        outcome = step(strategy, make_batch() if state.is_leader else make_batch().stub())
        outcome |= {name: merge_stages(outcome[name]) for name in ("before", "gradients", "after")}
        mapped = list(mapped_parameters(strategy.gpt, state.mode))
        assert all(each.parameter.requires_grad == each.trained for each in mapped)
        assert all(
            each.parameter.grad is None and not hasattr(each.parameter, "main_grad")
            for each in mapped
            if not each.trained
        )
        optimized = sum(parameter.numel() for parameter in strategy.optimizer.get_parameters())
        outcome["optimized"] = optimized, sum(each.local().numel() for each in mapped if each.trained)
        return outcome


def all_layouts(folder: Path) -> list[dict[str, Any]]:
    return [step_of_ranks(folder, layout) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_rules_of_one_tensor_agree() -> None:
    assert all(is_trained(name) for rule in RULES.values() for name in rule.hf)
    with some_untrained():
        kept = {name.split(".")[-2] for rule in RULES.values() for name in rule.hf if not is_trained(name)}
        assert kept == set(KEPT)
        assert not is_trained("model.layers.11.feed_forward.w3.weight")
        for name in {name for rule in RULES.values() for name in rule.hf}:
            assert len({rule.trained for rule in RULES.values() if name in rule.hf}) == 1


def test_untrained_weights_stay_as_they_are(ranks: RankPool, folder: Path) -> None:
    whole = HfStrategy(settings(folder, "hf"))
    whole.initialize()
    everything = step(whole, make_batch())
    with some_untrained():
        strategy = HfStrategy(settings(folder, "hf"))
        strategy.initialize()
        reference = step(strategy, make_batch())
        held = sum(x.numel() for group in strategy.trained.adam.param_groups for x in group["params"])  # type: ignore[union-attr]
        assert held == TOTAL - NUMBERS
    assert {name for name in everything["gradients"] if not is_kept(name)} == reference["gradients"].keys()
    for of_rank in ranks.run(all_layouts, folder, world_size=2):
        for layout, outcome in zip(LAYOUTS, of_rank, strict=True):
            mine, expected = outcome["optimized"]
            assert mine == expected > 0, layout
            check_outcome(str(layout), outcome, reference, BF16 if "dtype" in layout else 1e-5)
    check_outcome("hf", reference, everything, 1e-5)


def tied_layouts(folder: Path) -> list[dict[str, Tensor]]:
    """The gradients of a tied model whose embedding, and so its output, is not trained."""
    rules = {name: replace(RULES[name], trained=False) for name in ("embedding.weight", "head.weight")}
    outcomes = []
    for layout in ({"tp": 2}, {"pp": 2}, {"mode": "isp", "wp": 2}):
        config = settings(folder, **layout)
        with patch.dict(RULES, rules), parallel_groups(config.parallel) as state:  # type: ignore[arg-type]
            strategy = MegatronTrainStrategy(config, state)
            strategy.initialize()
            outcome = step(strategy, make_batch() if state.is_leader else make_batch().stub())
            outcomes.append(merge_stages(outcome["gradients"]))
    return outcomes


def test_tied_weights_are_untrained_together(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, TINY.model_copy(update={"tie_word_embeddings": True}))
    whole = HfStrategy(settings(folder, "hf"))
    whole.initialize()
    reference = step(whole, make_batch())["gradients"]
    for of_rank in ranks.run(tied_layouts, folder, world_size=2):
        for gradients in of_rank:
            assert gradients.keys() == reference.keys() - {"model.tok_embeddings.weight"}
            for name, gradient in gradients.items():
                expected = reference[name]
                assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def check_outcome(name: str, outcome: dict[str, Any], reference: dict[str, Any], limit: float) -> None:
    """Gradients are those of the reference, and of trained weights only, which alone have changed."""
    assert outcome["gradients"].keys() == {key for key in reference["gradients"] if not is_kept(key)}, name
    squares = 0.0
    for key, gradient in outcome["gradients"].items():
        expected = reference["gradients"][key]
        assert (gradient - expected).abs().max() <= limit * expected.abs().max(), (name, key)
        squares += float(expected.double().square().sum())
    assert outcome["grad_norm"] == pytest.approx(squares**0.5, rel=limit), name
    for key, before in outcome["before"].items():
        changed = not torch.equal(outcome["after"][key], before)
        # A norm of 1 that changes by 0.001 is 1 in bfloat16.
        unseen = not changed and before.dtype == torch.bfloat16 and "norm" in key
        assert changed != is_kept(key) or unseen, (name, key)


def save_and_load(folder: Path, checkpoint: Path, dtype: str) -> list[dict[str, Tensor]]:
    """A checkpoint of tp 2 whose untrained weights are others than the seed's, loaded into mode isp and into pp 2.

    Mode isp loads in place; in bfloat16, pp 2 is loaded by way of an fp32 copy.
    """
    config = settings(folder, tp=2, dtype=dtype)
    outcomes = []
    with some_untrained(), parallel_groups(config.parallel) as state:
        saved = MegatronTrainStrategy(config, state)
        saved.initialize()
        with torch.no_grad():
            for mapped in mapped_parameters(saved.gpt, state.mode):
                if not mapped.trained:
                    mapped.parameter.add_(1.0)
        saved.train_step(make_batch() if state.is_leader else make_batch().stub(), weighted_nll)
        saved.save_checkpoint(checkpoint)
        outcomes.append(merge_stages(weights_of(saved)))
    for layout in ({"mode": "isp", "wp": 2}, {"pp": 2}):
        config = settings(folder, dtype=dtype, **layout)
        with some_untrained(), parallel_groups(config.parallel) as state:
            loaded = MegatronTrainStrategy(config, state)
            loaded.initialize()
            loaded.load_checkpoint(checkpoint)
            outcomes.append(merge_stages(weights_of(loaded)))
    return outcomes


def test_a_checkpoint_keeps_them(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        for saved, *others in ranks.run(save_and_load, folder, tmp_path / dtype, dtype, world_size=2):
            for loaded in others:
                assert saved.keys() == loaded.keys()
                assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items()), dtype
    with some_untrained():
        saver, loader = HfStrategy(settings(folder, "hf")), HfStrategy(settings(folder, "hf", seed=8))
        saver.initialize()
        loader.initialize()
        saver.save_checkpoint(tmp_path / "hf")
        loader.load_checkpoint(tmp_path / "hf")
        theirs = weights_of(loader)
        assert all(torch.equal(theirs[name], tensor) for name, tensor in weights_of(saver).items())
