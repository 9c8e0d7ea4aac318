"""Continuing from a checkpoint: the settings of the run hold, the progress is the checkpoint's, in every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from roll.config import OptimizerSettings
from roll.parallel.state import parallel_groups
from roll.strategies import HfStrategy, MegatronTrainStrategy
from roll.strategies.progress import EndOfSchedule, changed_settings
from tests.layouts import name_of
from tests.log_messages import messages
from tests.rank_pool import RankPool
from tests.strategies.tiny import make_batch, merge_stages, settings, weighted_nll, write_tiny

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"name": "hf"}),
    (1, {}),
    (2, {"mode": "msp", "tp": 2}),
    (2, {"mode": "isp", "sp": 2, "wp": 2}),
    (2, {"pp": 2}),
    (2, {"cp": 2, "cp_comm": "ring"}),
]
PROGRESS = "roll.strategies.progress"
TWENTY = OptimizerSettings(lr=1e-2, schedule="linear", total_steps=20, max_grad_norm=1e9)
SAVED = OptimizerSettings(lr=1e-2, schedule="linear", total_steps=10, warmup_steps=2, weight_decay=0.1)
# All of them others: the step after the checkpoint is none that the old settings could take.
CHANGED = OptimizerSettings(
    lr=2e-2,
    min_lr=1e-3,
    betas=(0.8, 0.9),
    eps=1e-4,
    weight_decay=0.5,
    max_grad_norm=0.1,
    schedule="cosine",
    warmup_steps=1,
    total_steps=20,
)
ENDED = OptimizerSettings(lr=1e-2, schedule="linear", total_steps=3)


class Run:
    """A strategy that takes steps on numbered batches."""

    def __init__(self, folder: Path, layout: dict[str, Any], state: Any, optimizer: OptimizerSettings) -> None:
        config = settings(folder, **dict(layout), optimizer=optimizer)
        self.state = state
        self.strategy: Any = HfStrategy(config) if state is None else MegatronTrainStrategy(config, state)
        self.strategy.initialize()

    def steps(self, *seeds: int) -> list[float]:
        """The learning rate of each step."""
        rates = []
        for seed in seeds:
            batch = make_batch(seed=seed)
            if self.state is not None:
                batch = batch.chunk(self.state.degrees.dp)[self.state.at.dp]
            metrics = self.strategy.train_step(batch, weighted_nll)
            assert metrics["skipped_steps"] == 0
            rates.append(metrics["lr"])
        return rates

    def weights(self) -> dict[str, torch.Tensor]:
        parts = {name: tensor for bucket in self.strategy.model_update(1 << 20) for name, tensor in bucket.items()}
        return parts if self.state is None else merge_stages(parts)


def continued(folder: Path, checkpoints: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """The cases of this file, one after the other, on one rank."""
    found: dict[str, Any] = {}
    with messages(PROGRESS) as texts, nullcontext() if "name" in layout else _groups(folder, layout) as state:
        run = Run(folder, layout, state, TWENTY)
        rates = run.steps(0, 1, 2)
        run.strategy.save_checkpoint(checkpoints / "three")
        rates += run.steps(3)
        expected = run.weights()
        rates += run.steps(4)
        run.strategy.load_checkpoint(checkpoints / "three")
        rates += run.steps(3)
        found["replaced"] = rates, all(torch.equal(weight, expected[name]) for name, weight in run.weights().items())
        fresh = Run(folder, layout, state, TWENTY)
        fresh.strategy.save_checkpoint(checkpoints / "none")
        run.strategy.load_checkpoint(checkpoints / "none")
        first, again = fresh.steps(0), run.steps(0)
        same = all(torch.equal(weight, run.weights()[name]) for name, weight in fresh.weights().items())
        found["from the start"] = first, again, same
        found["unchanged settings"] = list(texts)

        old = Run(folder, layout, state, SAVED)
        old.steps(0, 1, 2, 3)
        old.strategy.save_checkpoint(checkpoints / "four")
        longer = Run(folder, layout, state, SAVED.model_copy(update={"total_steps": 20}))
        longer.strategy.load_checkpoint(checkpoints / "four")
        found["longer"] = longer.steps(4), list(texts)
        texts.clear()
        changed = Run(folder, layout, state, CHANGED)
        changed.strategy.load_checkpoint(checkpoints / "four")
        found["changed"] = changed.steps(4, 5), list(texts), changed.weights()
        texts.clear()

        ended = Run(folder, layout, state, ENDED)
        ended.steps(0, 1, 2)
        assert not texts
        before = ended.weights()
        rates = ended.steps(3, 4)
        kept = all(torch.equal(weight, before[name]) for name, weight in ended.weights().items())
        found["ended"] = rates, kept, list(texts)
    return found


@contextmanager
def _groups(folder: Path, layout: dict[str, Any]) -> Iterator[Any]:
    with parallel_groups(settings(folder, **dict(layout)).parallel) as state:
        yield state


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[dict[str, Any]]]]:
    """Name of each layout, and what its ranks found."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    return [
        (name_of(layout), ranks.run(continued, folder, tmp_path_factory.mktemp("saved"), layout, world_size=size))
        for size, layout in LAYOUTS
    ]


def test_a_loaded_state_replaces_whatever_the_strategy_did_before(outcomes: Any) -> None:
    for layout, found in outcomes:
        for rank in found:
            rates, same = rank["replaced"]
            # 1e-2 less a twentieth of it at each step; after the load the fourth step once more, to the same weights.
            assert rates == pytest.approx([0.01, 0.0095, 0.009, 0.0085, 0.008, 0.0085], rel=1e-12), layout
            assert same, layout
            first, again, same = rank["from the start"]
            assert first == again == [0.01] and same, layout
            assert rank["unchanged settings"] == [], layout


def test_the_settings_of_the_run_hold_and_the_checkpoint_has_the_progress(outcomes: Any) -> None:
    reference = outcomes[0][1][0]["changed"]
    for layout, found in outcomes:
        for number, rank in enumerate(found):
            rates, texts = rank["longer"]
            # Step 4 of a decay from step 2 to step 20: 1e-2 * (1 - 2/18).
            assert rates == pytest.approx([0.01 * 16 / 18], rel=1e-12), layout
            news = "optimizer settings of this run replace the checkpoint's: "
            assert texts == [news + "total_steps 10 -> 20"] * (number == 0), layout
            rates, texts, weights = rank["changed"]
            assert rates == pytest.approx(reference[0], rel=1e-12), layout
            assert texts == [
                f"{news}lr 0.01 -> 0.02; min_lr 0.0 -> 0.001; betas [0.9, 0.95] -> [0.8, 0.9]; eps 1e-08 -> 0.0001; "
                "weight_decay 0.1 -> 0.5; max_grad_norm 1.0 -> 0.1; warmup_steps 2 -> 1; schedule linear -> cosine; "
                "total_steps 10 -> 20"
            ] * (number == 0), layout
            for name, weight in reference[2].items():
                # Adam divides by a root: rounding of a tiny gradient in the four steps before grows.
                torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-4, msg=f"{layout} {name}")


def test_training_at_rate_zero_is_said_once(outcomes: Any) -> None:
    for layout, found in outcomes:
        for number, rank in enumerate(found):
            rates, kept, texts = rank["ended"]
            assert rates == [0.0, 0.0] and kept, layout
            assert texts == [
                "optimizer step 4 and all behind it have learning rate 0: schedule linear ended at total_steps 3 with "
                "min_lr 0.0. A larger total_steps or min_lr goes on."
            ] * (number == 0), layout


@pytest.mark.parametrize(
    ("changes", "said_at"),
    [
        ({"schedule": "linear", "total_steps": 4}, 4),
        ({"schedule": "cosine", "total_steps": 4, "warmup_steps": 2}, 4),
        ({"schedule": "linear", "total_steps": 4, "warmup_steps": 4}, 5),  # Step 4 has the full rate.
        ({"schedule": "linear", "total_steps": 4, "min_lr": 1e-5}, None),
        ({"schedule": "constant", "total_steps": 4, "warmup_steps": 2}, None),  # The warm-up starts at 0 on purpose.
    ],
)
def test_what_counts_as_the_end_of_a_schedule(changes: dict[str, Any], said_at: int | None) -> None:
    for first in (0, 6):  # A continued run may begin behind the end.
        end = EndOfSchedule(OptimizerSettings(lr=1e-2, **changes))
        said = []
        with messages(PROGRESS) as texts:
            for step in range(first, 8):
                end.check(step)
                said.append(len(texts))
        assert said == [int(said_at is not None and step >= said_at) for step in range(first, 8)]


def test_settings_that_are_new_since_the_checkpoint_have_no_old_value() -> None:
    saved = TWENTY.model_dump(mode="json")
    assert changed_settings(saved, TWENTY) == []
    del saved["min_lr"]
    assert changed_settings(saved, TWENTY) == ["min_lr None -> 0.0"]
