"""What a worker makes of the exceptions of a role, without actors."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from roll.workers.failure import RankError
from tests.workers.probes import Probe


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


def test_result_that_nobody_reads_is_not_sent() -> None:
    assert probe().execute("alive", "result") > 0
    assert probe().execute("alive", "nothing") is None


def test_a_worker_looks_like_a_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "environ", {"RANK": "5", "HOME": "/"})
    probe().join("10.0.0.1", 1234, threads=threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert os.environ == {
        "HOME": "/",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads + 1),
    }
