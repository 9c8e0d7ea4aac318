"""Plans with unequal shares and empty micro-batches: results and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config import MicroBatchSettings, OptimizerSettings
from roll.data.micro_batches import with_plan
from roll.data.plan import plan_micro_batches
from roll.parallel.state import parallel_groups
from roll.protocol import DataProto
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import make_batch, merge_stages, settings, weighted_nll, weighted_value_error, write_tiny

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (4, {}),
    (4, {"tp": 2}),
    (4, {"pp": 2}),
    (4, {"cp": 2, "cp_comm": "ring"}),
    (2, {"mode": "isp", "wp": 2}),
    (4, {"mode": "isp", "sp": 2, "wp": 2}),
    (4, {"mode": "isp", "wp": 2, "pp": 2}),
]
ROWS = (0, 1, 3, 5)
MICRO_BATCHES = (MicroBatchSettings(rows=2), MicroBatchSettings(rows=1), MicroBatchSettings(max_tokens=12))
# Several steps on the same weights: 1e-30 of anything does not change a float of 1e-3.
UNMOVED = OptimizerSettings(lr=1e-30, max_grad_norm=1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def log_probs(data: DataProto, output: Any) -> dict[str, Tensor]:
    return {"log_probs": output.log_probs(data["input_ids"], data["attention_mask"])}


def run_plans(folder: Path, layout: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank: results, metrics and gradients of each batch under each way to cut it."""
    config = settings(folder, optimizer=UNMOVED, **layout)
    outcomes = []
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        for rows in ROWS:
            for micro_batch in MICRO_BATCHES:
                batch = with_plan(make_batch(6)[:rows], state.degrees.dp, micro_batch)
                assert batch.plan is not None
                share = batch.select_idxs(list(batch.plan.rows[state.at.dp])).with_plan(batch.plan)
                share = share if state.is_leader else share.stub()
                results = strategy.forward_step(share, log_probs)
                metrics = strategy.train_step(share, weighted_nll)
                gradients = merge_stages(dict(strategy.gradients())) if not metrics["skipped_steps"] else {}
                outcomes.append(
                    {
                        "rank": (state.is_reporter, state.at.dp),
                        "plan": batch.plan,
                        "log_probs": results and results["log_probs"],
                        "metrics": metrics,
                        "gradients": gradients,
                    }
                )
    return outcomes


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[int, dict[str, Any]]:
    """What transformers' model says of the first rows of the batch, by their number."""
    strategy = HfStrategy(settings(folder, "hf", optimizer=UNMOVED))
    strategy.initialize()
    found = {}
    for rows in ROWS:
        batch = make_batch(6)[:rows]
        results = strategy.forward_step(batch, log_probs)
        metrics = strategy.train_step(batch, weighted_nll)
        gradients = {name: gradient.clone() for name, gradient in strategy.gradients()} if rows else {}
        found[rows] = {"log_probs": results["log_probs"], "metrics": metrics, "gradients": gradients}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=name_of)
def test_uneven_plans_give_what_one_process_gives(
    ranks: RankPool, folder: Path, reference: dict[int, dict[str, Any]], world_size: int, layout: dict[str, Any]
) -> None:
    by_rank = ranks.run(run_plans, folder, layout, world_size=world_size)
    cases = [(rows, micro_batch) for rows in ROWS for micro_batch in MICRO_BATCHES]
    for (rows, _), outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = reference[rows]
        reports = sorted((o for o in outcomes if o["rank"][0]), key=lambda o: o["rank"][1])
        joined = reports[0]["plan"].restore(torch.cat([outcome["log_probs"] for outcome in reports]))
        # The tolerances of fp32, as in test_against_one_process.
        torch.testing.assert_close(joined, expected["log_probs"], rtol=1e-6, atol=1e-5)
        for outcome in outcomes:
            if rows == 0:
                assert outcome["metrics"] == expected["metrics"] == {"lr": UNMOVED.lr, "skipped_steps": 1.0}
                continue
            assert outcome["metrics"]["skipped_steps"] == expected["metrics"]["skipped_steps"] == 0
            assert outcome["metrics"]["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=1e-5)
            assert outcome["gradients"].keys() == expected["gradients"].keys()
            for name, gradient in expected["gradients"].items():
                error = (outcome["gradients"][name] - gradient).abs().max() / gradient.abs().max()
                assert error <= 1e-5, f"{rows} rows, {name}: relative error {error:.2e}"
        for outcome in reports if rows else ():
            assert outcome["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-6)
    plans = [outcome["plan"] for outcome in by_rank[0]]
    assert any(not micro_batch for plan in plans[3:] for share in plan.shares for micro_batch in share)
    assert any(len({len(rows) for rows in plan.rows}) > 1 for plan in plans)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_reference_takes_empty_micro_batches_too(folder: Path, head: str) -> None:
    strategy = HfStrategy(settings(folder, "hf", optimizer=UNMOVED, head=head))
    strategy.initialize()
    loss = weighted_nll if head == "lm" else weighted_value_error
    plan = plan_micro_batches([6, 7, 8], 1, rows=1, multiple_of=4)
    assert plan.shares == (((0,), (1,), (2,), ()),)
    whole = make_batch(6)[:3]
    expected = strategy.train_step(whole, loss)
    gradients = {name: gradient.clone() for name, gradient in strategy.gradients()}
    metrics = strategy.train_step(whole.with_plan(plan), loss)
    assert metrics == pytest.approx(expected, rel=1e-6)
    for name, gradient in strategy.gradients():
        # Sums of fp32 in another order.
        torch.testing.assert_close(gradient, gradients.pop(name), rtol=1e-5, atol=1e-6)
    assert not gradients
    if head == "lm":
        results = strategy.forward_step(whole.with_plan(plan), log_probs)
        one_by_one = strategy.forward_step(whole, log_probs)
        torch.testing.assert_close(results["log_probs"], one_by_one["log_probs"], rtol=1e-6, atol=1e-5)
