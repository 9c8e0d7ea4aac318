"""Every parallel layout computes what one process with transformers' own Llama computes: results and gradients.

Tolerances are those of fp32: sums of the same numbers in another order differ in the seventh digit. Results are
compared on every rank that reports, gradients as the whole tensors that all ranks' shards make up.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from roll.algorithms import LossTerm, total_loss
from roll.algorithms.grpo import GRPO, GRPOSettings
from roll.models.hf_mapping import mapped_parameters
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import HfStrategy, MegatronInferStrategy, MegatronTrainStrategy
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import (
    make_batch,
    merge_stages,
    settings,
    share_of,
    weighted_value_error,
    write_tiny,
)

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tp": 2}),
    (4, {"tp": 4}),
    (2, {"mode": "msp", "tp": 2}),
    (4, {"mode": "msp", "tp": 4}),
    (2, {"mode": "fsp", "tp": 2}),
    (4, {"mode": "fsp", "tp": 4}),
    (2, {"mode": "isp", "sp": 2}),
    (2, {"mode": "isp", "wp": 2}),  # dp 2
    (2, {"mode": "isp", "sp": 2, "wp": 2}),
    (4, {"mode": "isp", "sp": 2, "wp": 4}),  # dp 2
    (4, {"mode": "isp", "sp": 4, "wp": 2}),
    (4, {"mode": "isp", "sp": 4, "wp": 4}),
    (4, {"mode": "isp", "sp": 2, "wp": 2}),  # dp 2, as replicas of the weights
    (2, {"pp": 2}),
    (4, {"tp": 2, "pp": 2}),
    (4, {"mode": "msp", "tp": 2, "pp": 2}),
    (4, {"mode": "fsp", "tp": 2, "pp": 2}),
    (4, {"mode": "isp", "sp": 2, "wp": 2, "pp": 2}),
    (2, {}),  # dp 2
    (4, {"tp": 2}),  # dp 2, as in the next three
    (4, {"mode": "msp", "tp": 2}),
    (4, {"mode": "fsp", "tp": 2}),
    (4, {"pp": 2}),
    (2, {"cp": 2}),
    (4, {"cp": 4}),
    (2, {"cp": 2, "cp_comm": "all_gather"}),
    (4, {"cp": 4, "cp_comm": "all_gather"}),
    (4, {"cp": 4, "cp_comm": "ring"}),
    (2, {"cp": 2, "cp_comm": "ring"}),
    (4, {"tp": 2, "cp": 2, "cp_comm": "ring"}),
    (4, {"mode": "msp", "tp": 2, "cp": 2, "cp_comm": "all_gather"}),
    (4, {"mode": "fsp", "tp": 2, "cp": 2, "cp_comm": "a2a"}),
    (4, {"mode": "fsp", "tp": 2, "cp": 2, "cp_comm": "ring"}),
    (4, {"pp": 2, "cp": 2, "cp_comm": "a2a"}),
    (4, {"pp": 2, "cp": 2, "cp_comm": "ring"}),
    (4, {"cp": 2, "cp_comm": "all_gather"}),  # dp 2
]
CASES = [
    (world_size, layout, head)
    for head, layouts in (("lm", LAYOUTS), ("value", LAYOUTS[1::2]))
    for world_size, layout in layouts
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def token_results(data: DataProto, output: Any) -> dict[str, Tensor]:
    log_probs, entropy = output.log_probs_and_entropy(data["input_ids"], data["attention_mask"])
    return {
        "log_probs": log_probs,
        "entropy": entropy,
        "entropy_alone": output.entropy(data["attention_mask"]),
        "response_log_probs": output.log_probs(data["input_ids"], data["response_mask"]),
    }


def all_logits(strategy: MegatronInferStrategy, data: DataProto, output: Any) -> dict[str, Tensor]:
    """Logits at their rows, the vocabulary gathered over the tensor-parallel ranks."""
    logits = output.row_logits()
    assert logits.shape == (*data["input_ids"].shape, strategy.model_config.vocab_size // strategy.state.tp.size())
    parts = [torch.empty_like(logits) for _ in range(strategy.state.tp.size())]
    dist.all_gather(parts, logits.contiguous(), group=strategy.state.tp)
    return {"logits": torch.cat(parts, dim=-1)}


def squared_logits(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of logits at their rows, in which each row and column counts differently.

    A rank computes it over its part of the vocabulary. The gradients, summed over the ranks, are those of the whole.
    """
    logits = output.row_logits()[:, :-1]
    return (logits.square() * data["weights"].unsqueeze(-1)).sum() / data.normalizers.tokens, {}


def gradients_of_logits(folder: Path, layout: dict[str, Any]) -> dict[str, Tensor]:
    config = settings(folder, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        batch = share_of(make_batch(), state.at.dp, state.degrees.dp)
        strategy.train_step(batch if state.is_leader else DataProto(), squared_logits)
        return merge_stages(dict(strategy.gradients()))


def experience() -> DataProto:
    """The batch, with what GRPO's terms read; log-probs near, but not at, the model's."""
    batch, generator = make_batch(), torch.Generator().manual_seed(3)

    def noise() -> Tensor:
        return torch.randn(batch["weights"].shape, generator=generator)

    return batch.update({"log_probs": noise() - 3.5, "ref_log_probs": noise() - 3.5, "advantages": noise()})


def weighted_nll_of_tokens(data: DataProto, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The terms of `weighted_nll`."""
    return -output.log_probs(data["input_ids"], data["response_mask"]) * data["weights"], {}


# Each token counts differently in the first; the others are GRPO's policy and KL, divided in another way.
TERMS = [
    LossTerm(function=weighted_nll_of_tokens, reads=frozenset({"weights"})),
    *GRPO(GRPOSettings(kl_coef=0.5)).losses()["actor"],
]


def run_layout(folder: Path, layout: dict[str, Any], head: str) -> dict[str, Any]:
    """One rank: forward results of its share, then one training step; all gradients."""
    config = settings(folder, head=head, temperature=0.7, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        batch = share_of(experience(), state.at.dp, state.degrees.dp)
        if not state.is_leader:  # As dispatch does it: only leaders are given data.
            batch = batch.stub()
        if head == "lm":
            results = strategy.forward_step(batch, token_results)
            logits = strategy.forward_step(batch, partial(all_logits, strategy))
            results = results | logits if results is not None and logits is not None else None
            metrics = strategy.train_step(batch, partial(total_loss, TERMS))
        else:
            _set_value_head(strategy)
            results = strategy.forward_step(batch, value_results)
            metrics = strategy.train_step(batch, weighted_value_error)
        gradients = merge_stages(dict(strategy.gradients()))
        return {
            "dp": state.at.dp,
            "reports": state.is_reporter,
            "results": results,
            "metrics": metrics,
            "gradients": gradients,
        }


def value_results(data: DataProto, output: Any) -> dict[str, Tensor]:
    return {"values": output.values(data["attention_mask"])}


def _set_value_head(strategy: Any) -> None:
    """A value head that is not zero, the same everywhere."""
    weight = torch.linspace(-1, 1, strategy.model_config.hidden_size).unsqueeze(0)
    with torch.no_grad():
        if isinstance(strategy, HfStrategy):
            strategy.value_head.weight.copy_(weight)
        elif strategy.state.is_last_stage:
            (mapped,) = [m for m in mapped_parameters(strategy.gpt, strategy.state.mode) if "v_head" in m.hf_names[0]]
            weights = strategy.state.weights
            part = weight if mapped.dim is None else weight.chunk(weights.size(), mapped.dim)[weights.rank()]
            mapped.parts()[0].copy_(part)


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return {head: _reference(folder, head) for head in ("lm", "value")}


def _reference(folder: Path, head: str) -> dict[str, Any]:
    strategy = HfStrategy(settings(folder, "hf", head=head, temperature=0.7))
    strategy.initialize()
    batch = experience()
    if head == "lm":
        results = strategy.forward_step(batch, token_results)
        logits = strategy.forward_step(batch, lambda data, output: {"logits": output.tensor})["logits"]
        results["logits"] = torch.where(batch["attention_mask"].bool().unsqueeze(-1), logits, 0.0)
        rows = strategy.forward_step(batch, lambda data, output: {"logits": output.row_logits()})
        assert torch.equal(rows["logits"], results["logits"])
        metrics = strategy.train_step(batch, partial(total_loss, TERMS))
    else:
        _set_value_head(strategy)
        with pytest.raises(ValueError, match="a model with head 'value' has no logits"):
            strategy.forward_step(batch, lambda data, output: {"logits": output.row_logits()})
        results = strategy.forward_step(batch, value_results)
        metrics = strategy.train_step(batch, weighted_value_error)
    return {"results": results, "metrics": metrics, "gradients": dict(strategy.gradients())}


@pytest.mark.parametrize(("world_size", "layout", "head"), CASES, ids=name_of)
def test_results_and_gradients_are_those_of_one_process(
    ranks: RankPool, folder: Path, reference: dict[str, Any], world_size: int, layout: dict[str, Any], head: str
) -> None:
    expected = reference[head]
    outcomes = ranks.run(run_layout, folder, layout, head, world_size=world_size)

    reports = sorted((outcome for outcome in outcomes if outcome["reports"]), key=lambda outcome: outcome["dp"])
    assert all(outcome["results"] is None for outcome in outcomes if not outcome["reports"])
    for name, values in expected["results"].items():
        actual = torch.cat([outcome["results"][name] for outcome in reports])
        # Values reach 4, logits 10: there the seventh digit is near 1e-6.
        torch.testing.assert_close(actual, values, rtol=1e-6, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")

    for outcome in reports:
        assert outcome["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-6)
    for outcome in outcomes:
        assert outcome["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
        assert outcome["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            error = (outcome["gradients"][name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"tp": 2}),
        (2, {"mode": "fsp", "tp": 2}),
        (2, {"mode": "isp", "sp": 2, "wp": 2}),
        (2, {"cp": 2, "cp_comm": "ring"}),
        (4, {"mode": "msp", "tp": 2, "pp": 2}),
    ],
    ids=name_of,
)
def test_a_loss_of_row_logits_has_the_gradients_of_one_process(
    ranks: RankPool, folder: Path, world_size: int, layout: dict[str, Any]
) -> None:
    strategy = HfStrategy(settings(folder, "hf"))
    strategy.initialize()
    strategy.train_step(make_batch(), squared_logits)
    expected = dict(strategy.gradients())
    for gradients in ranks.run(gradients_of_logits, folder, layout, world_size=world_size):
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, f"{name}: relative error {error:.2e}"


def test_masked_positions_are_zero(reference: dict[str, Any], ranks: RankPool, folder: Path) -> None:
    (outcome,) = ranks.run(run_layout, folder, {}, "lm", world_size=1)
    batch = make_batch()
    attended, responses = batch["attention_mask"][:, 1:].bool(), batch["response_mask"][:, 1:].bool()
    # A row's first token has no token before it, so nothing says how likely it was.
    first = batch["attention_mask"][:, 1:].bool() & ~batch["attention_mask"][:, :-1].bool()
    for name, kept in (("log_probs", attended), ("entropy", attended), ("response_log_probs", responses)):
        assert (outcome["results"][name][~kept] == 0).all()
        assert (outcome["results"][name][first] == 0).all()
        assert (outcome["results"][name][kept & ~first] != 0).all()
