"""What a worker makes of the exceptions of a role, without actors."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from roll.workers.dispatch import Dispatch
from roll.workers.failure import RankError
from roll.workers.method import register, registered_methods
from roll.workers.worker import WorkerActor, actor_class
from tests.workers.probes import Asking, Probe


def probe() -> Probe:
    return Probe(role="probe", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("how", "last_line"),
    [
        ("needs arguments", "tests.workers.probes.NeedsArguments: wanted 3, found 4"),
        ("holds lock", "tests.workers.probes.HoldsLock: heads 3 do not divide by tp 2"),
    ],
)
def test_any_exception_survives_the_way(how: str, last_line: str) -> None:
    with pytest.raises(RankError, match="in fail") as raised:
        probe().execute("fail_on", "result", 0, how)
    arrived = pickle.loads(pickle.dumps(raised.value))
    lines = arrived.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in fail_on")  # the frame of `execute` is not the user's
    assert lines[-1] == last_line
    assert arrived.when == raised.value.when > 1.7e9


def asking() -> Asking:
    return Asking(role="asking", rank=0, world_size=1)


def test_methods_that_await_are_run_to_their_end() -> None:
    worker = asking()
    assert worker.execute("ask", "result", "a") == ["a begins", "a ends"]
    assert worker.execute("handed_on", "result", name="b")[2:] == ["b begins", "b ends"]
    assert worker.execute("ask", "nothing", "c") is None and worker.log[4:] == ["c begins", "c ends"]
    assert worker.execute("note", "result", "d")[6:] == ["d"]


def test_all_calls_share_one_event_loop() -> None:
    worker = asking()
    assert [worker.execute("use_a_lock", "result") for _ in range(2)] == ["used"] * 2
    worker.execute("leave_running", "result")
    assert worker.execute("ask", "result", "a") == ["left running", "a begins", "a ends"]


def test_a_method_that_fails_while_it_awaits_tells_its_own_frames() -> None:
    with pytest.raises(RankError) as raised:
        asking().execute("fail_while_asking", "nothing")
    lines = raised.value.traceback.splitlines()
    assert [line.split(" in ")[-1] for line in lines if line.startswith("  File")] == ["fail_while_asking"]
    assert lines[-1] == "tests.workers.probes.HoldsLock: the server is away"


def test_a_method_that_is_cancelled_has_failed() -> None:
    """CancelledError is no Exception, so that tasks do not swallow it; a call is no task of anybody."""
    worker = asking()
    with pytest.raises(RankError) as raised:
        worker.execute("await_the_cancelled", "nothing")
    assert "in await_the_cancelled" in raised.value.traceback
    assert raised.value.traceback.splitlines()[-1] == "asyncio.exceptions.CancelledError"
    assert worker.execute("ask", "result", "a") == ["a begins", "a ends"]


def test_generators_are_refused() -> None:
    def yields(self: Any) -> Iterator[int]:
        yield 1

    async def yields_and_awaits(self: Any) -> AsyncIterator[int]:
        yield 1

    for method in (yields, yields_and_awaits, functools.partial(yields), staticmethod(yields)):
        with pytest.raises(ValueError, match="yields, and a call has one result: return a list"):
            register(Dispatch.ONE_TO_ALL)(method)

    class Overrides(Asking):
        note = yields  # type: ignore[assignment]

    with pytest.raises(ValueError, match="yields yields, and a call has one result"):
        registered_methods(Overrides)
    for keep in ("result", "nothing"):
        with pytest.raises(RankError, match="expression returned a generator, of which nothing has run: return a list"):
            asking().execute("expression", keep)


def test_result_that_nobody_reads_is_not_sent() -> None:
    assert probe().execute("alive", "result") > 0
    assert probe().execute("alive", "nothing") is None


def test_a_worker_looks_like_a_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "5", "HOME": "/"})
    actor: WorkerActor = actor_class(Probe)(threads=3, role="probe", rank=0, world_size=1)
    actor.execute("join", "nothing", "10.0.0.1", 1234)
    assert os.environ == {
        "HOME": "/",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "3",
    }
