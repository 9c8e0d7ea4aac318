"""Processes of the tests: `tests/processes.py`."""

from __future__ import annotations

import pytest

from tests.processes import RAY_GAVE_UP, started_ray


def test_a_ray_that_gave_up_on_a_busy_machine_is_started_again() -> None:
    outcomes = iter([Exception(f"{RAY_GAVE_UP}. This"), AssertionError(f"exit status 1\n{RAY_GAVE_UP}"), None])
    calls = []

    def start() -> str:
        calls.append(1)
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return "Ray"

    assert started_ray(start) == "Ray" and len(calls) == 3


@pytest.mark.parametrize(("said", "calls"), [("no port is free", 1), (RAY_GAVE_UP, 3)])
def test_another_error_and_the_last_one_are_raised(said: str, calls: int) -> None:
    made = []

    def start() -> None:
        made.append(1)
        raise RuntimeError(said)

    with pytest.raises(RuntimeError, match=said):
        started_ray(start, attempts=3)
    assert len(made) == calls
