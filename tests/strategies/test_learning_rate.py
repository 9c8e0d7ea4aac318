"""The closed form of the learning rate: values by hand, and Megatron-Core's scheduler step by step."""

from __future__ import annotations

from math import sqrt
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.config import OptimizerSettings
from roll.strategies.learning_rate import learning_rate


def rates(settings: OptimizerSettings, steps: int) -> list[float]:
    return [learning_rate(settings, step) for step in range(steps)]


def test_constant_by_hand() -> None:
    assert rates(OptimizerSettings(lr=0.5), 3) == [0.5, 0.5, 0.5]
    assert rates(OptimizerSettings(lr=0.8, warmup_steps=4, min_lr=0.1), 7) == pytest.approx(
        [0.0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    )


def test_linear_by_hand() -> None:
    # From 1.0 at the end of the warm-up (step 2) to 0.2 at step 6: 0.2 less at each step, then it stays.
    settings = OptimizerSettings(lr=1.0, min_lr=0.2, warmup_steps=2, total_steps=6, schedule="linear")
    assert rates(settings, 9) == pytest.approx([0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_by_hand() -> None:
    # (1 + cos(pi d)) / 2 at d = 0, 1/4, 1/2, 3/4, 1, above 0.2 by that share of 0.8.
    high, low = (1 + sqrt(0.5)) / 2, (1 - sqrt(0.5)) / 2
    settings = OptimizerSettings(lr=1.0, min_lr=0.2, total_steps=4, schedule="cosine")
    assert rates(settings, 6) == pytest.approx([1.0, 0.2 + 0.8 * high, 0.6, 0.2 + 0.8 * low, 0.2, 0.2])


def test_a_schedule_that_is_all_warm_up() -> None:
    settings = OptimizerSettings(lr=1.0, warmup_steps=2, total_steps=2, schedule="linear")
    assert rates(settings, 5) == pytest.approx([0.0, 0.5, 1.0, 0.0, 0.0])


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 6),
    st.integers(0, 8),
    st.sampled_from([0.0, 1e-5, 1e-3]),
)
def test_steps_of_megatron_cores_scheduler(schedule: str, warmup: int, decay: int, min_lr: float) -> None:
    from roll.strategies.megatron_train import _schedule

    settings = OptimizerSettings(
        lr=1e-3,
        min_lr=min_lr,
        warmup_steps=warmup,
        total_steps=max(1, warmup + decay),
        schedule=schedule,  # type: ignore[arg-type]
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": None, "weight_decay": 0.0, "wd_mult": 1.0, "lr_mult": 1.0}])
    scheduler = _schedule(settings, optimizer)
    for step in range(warmup + decay + 3):
        assert learning_rate(settings, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), step
        scheduler.step(increment=1)
