"""Clusters on real Ray actors: what a call returns, how failures reach the driver, what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from roll.parallel.degrees import ParallelDegrees
from roll.protocol import ROW_DELIVERIES, DataProto, DataProtoFuture, MicroBatchPlan, storage
from roll.workers import (
    CallTimedOut,
    Cluster,
    PendingCall,
    Placement,
    PlacementLayout,
    Worker,
    WorkerError,
    WorkerFailed,
    as_batch,
)
from tests.processes import PATIENCE_S, descendants, end, kill, processes_of, wait_for_end
from tests.workers.probes import Askings, Probes

pytestmark = pytest.mark.usefixtures("local_ray")

META = {"step": 3}
STORE = ROW_DELIVERIES["object_store"]


@pytest.fixture
def placement(local_ray: None) -> Iterator[Placement]:
    with Placement(PlacementLayout({"probe": 2, "single": 1, "other": 1})) as placement:
        yield placement


def probes(placement: Placement, **settings: Any) -> Probes:
    return Probes(role="probe", degrees=ParallelDegrees(2, tp=2), placement=placement, **settings)


def joined(placement: Placement) -> Probes:
    """Two probes in one gloo group, which has met once, so that all connections are there."""
    role = probes(placement)
    role.init_group()
    assert role.sum_of_ranks() == [1, 1]
    return role


def test_two_runs_one_after_the_other(local_ray: None) -> None:
    seen: set[int] = set()
    for _ in range(2):
        # All four CPUs are reserved: what the first run did not give back, the second would wait for.
        with Placement(PlacementLayout({"probe": 2, "not started": 4})) as placement:
            role = Probes(role="probe", degrees=ParallelDegrees(2), placement=placement, threads=3, delivery=STORE)
            first, second = role.environment.submit(), role.alive.submit()
            ranks = processes_of(second.result())  # in any order
            same = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "3"}
            assert first.done() and first.result() == [{"RANK": "0"} | same, {"RANK": "1"} | same]
            assert role.threads_at_import() == ["3", "3"]
            assert role.own_delivery() == [STORE, STORE]
        assert placement.watches == []
        wait_for_end(ranks)
        seen |= {rank.pid for rank in ranks}
        with pytest.raises(WorkerError, match="the probe cluster was stopped"):
            role.alive()
        role.cluster.shutdown()
    assert len(seen) == 4 and os.getpid() not in seen


def test_planned_batch_there_and_back(placement: Placement) -> None:
    plan = MicroBatchPlan(shares=(((0,), (1, 2)), ((0,), (1,))), rows=((4, 0, 3), (2, 1)))
    data = DataProto.from_dict({"x": torch.arange(5)}).with_plan(plan)
    with Probes(role="probe", degrees=ParallelDegrees(2), placement=placement) as role:
        ranks = processes_of(role.alive())
        assert role.rows(data) == [[4, 0, 3], [2, 1]]
        assert role.scaled(data, scale=10)["y"].tolist() == [0, 10, 20, 30, 40]
        with pytest.raises(ValueError, match="with a micro-batch plan must be brought back"):
            role.scaled.submit_remote(data, scale=10)
    wait_for_end(ranks)


def test_methods_that_await_run_one_at_a_time_in_the_order_of_the_calls(placement: Placement) -> None:
    """A class with an `async def` would be an actor that runs up to 1000 calls at once, in any order."""
    data = DataProto.from_dict({"x": torch.arange(4)})
    with Askings(role="probe", degrees=ParallelDegrees(2), placement=placement) as role:
        calls = [(role.note if name in "be" else role.ask).submit(name) for name in "abcdef"]
        log = [line for n in "abcdef" for line in ([n] if n in "be" else [f"{n} begins", f"{n} ends"])]
        assert calls[-1].result() == [log] * 2
        assert [len(call.result()[0]) for call in calls[:-1]] == [2, 3, 5, 7, 8]
        assert role.doubled(data)["x"].tolist() == [0, 2, 4, 6]
        assert role.doubled.submit_remote(data).result().get()["x"].tolist() == [0, 2, 4, 6]
        with pytest.raises(WorkerFailed, match="HoldsLock: the server is away"):
            role.fail_while_asking()


def test_arguments_that_the_constructor_does_not_take_are_refused_on_the_driver(placement: Placement) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bad_rank'"):
        Cluster(Worker, role="single", degrees=ParallelDegrees(1), placement=placement, worker_kwargs={"bad_rank": 1})
    assert placement.watches == []


def test_a_batch_that_asks_for_padding_is_filled_up(placement: Placement) -> None:
    data = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    with Probes(role="probe", degrees=ParallelDegrees(2), placement=placement) as role:
        assert role.scaled(data, scale=3)["y"].tolist() == [0, 3, 6, 9, 12]
        message = "5 rows does not divide among dp 2 groups; auto_padding holds for methods .* returns_batch=True"
        with pytest.raises(ValueError, match=message):
            role.rows(data)  # whose list of results could not be cut


def test_results_may_stay_with_the_workers(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataProto.from_dict({"x": torch.arange(4)})

    def unpacked_here(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        assert shape[0] == 0, "rows came to the driver"
        return storage.unpacked(values, dtype, shape)

    with (
        Probes(role="probe", degrees=ParallelDegrees(2), placement=placement) as two,
        Probes(role="single", degrees=ParallelDegrees(1), placement=placement) as one,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                "roll.protocol.batch_data.storage", SimpleNamespace(**vars(storage) | {"unpacked": unpacked_here})
            )
            negated = two.negated.submit_remote(data).result()
            twice = one.negated.submit_remote(as_batch(negated)).result()
        assert isinstance(negated, DataProtoFuture) and negated.num_rows == twice.num_rows == 4
        assert two.rows(as_batch(twice)) == [[0, 1], [2, 3]]
        assert one.rows(as_batch(negated)) == [[0, -1, -2, -3]]
        fetched = negated.get()
        assert fetched["x"].tolist() == [0, -1, -2, -3] and fetched["more"].tolist() == [0, 1, 2, 3]
        assert fetched.meta_info == {"step": 3, "metrics": {"rank": [0, 1]}}
        assert two.squared(as_batch(negated))["y"].tolist() == [0, 1, 4, 9]  # which reads x alone
        # What cannot be is refused before a rank is called, and both clusters go on.
        with pytest.raises(ValueError, match="rows is not registered with returns_batch=True"):
            two.rows.submit_remote(data)  # type: ignore[misc]
        with pytest.raises(ValueError, match="the batch lacks x; it has y"):
            two.squared(as_batch(one.scaled.submit_remote(data, scale=2).result()))
        one.cluster.shutdown()
        gone = as_batch(twice)
        uses: tuple[Callable[[], object], ...] = (
            twice.get,
            lambda: two.rows(gone),
            lambda: two.scaled.submit_remote(gone, scale=2),
        )
        for use in uses:
            with pytest.raises(WorkerError, match="the rows were with the workers of single, which have been stopped"):
                use()
        assert two.rows(as_batch(negated)) == [[0, -1], [-2, -3]]


def test_death_of_a_worker_that_holds_rows(placement: Placement) -> None:
    single, other = (Probes(role=role, degrees=ParallelDegrees(1), placement=placement) for role in ("single", "other"))
    other.cluster.ready()
    rows = single.negated.submit_remote(DataProto.from_dict({"x": torch.arange(4)})).result()
    ray.kill(single.cluster.actors.handles[0])
    with pytest.raises(WorkerFailed) as failed:
        other.rows(as_batch(rows))
    assert failed.value.role == "single"


def test_shares_are_put_once_and_are_each_ranks_own(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks, dp 2 and tp 2: two shares and one stub, whatever the number of ranks; see `Probe.squared`."""
    put, sizes = ray.put, []

    def counting(value: Any) -> ray.ObjectRef:
        sizes.append(sum(x.nbytes for x in value.tensors.values()) if isinstance(value, DataProto) else 0)
        return put(value)

    monkeypatch.setattr(ray, "put", counting)
    degrees = ParallelDegrees(4, tp=2)
    data = DataProto.from_dict({"x": torch.arange(3), "half": torch.ones(3, 5, dtype=torch.bfloat16)}, meta_info=META)
    with Placement(PlacementLayout({"probe": 4})) as placement:
        role = Probes(role="probe", degrees=degrees, placement=placement)
        assert role.squared(data)["y"].tolist() == [0, 1, 4]  # padded to 4 rows, and cut again
        assert sizes == [16, 16] and data["x"].tolist() == [0, 1, 2]
        assert role.add([1, 2, 3, 4], right=[10, 20, 30, 40]) == [11, 22, 33, 44]
        role.init_group()
        sizes.clear()
        assert role.kinds(data[:2]) == [["rows", "stub"] * 2] * 2
        assert sizes == [18, 18, 0]
        remote = role.squared.submit_remote(data.repeat(4)[:4]).result()
        assert role.kinds(as_batch(remote)) == [["rows", "stub"] * 2] * 2  # the stubs know its meta_info
        sizes.clear()
        role.cluster.delivery = STORE
        assert role.kinds(data[:2]) == [["rows"] * 4] * 2
        assert sizes == [18, 18]


def test_call_that_cannot_be_made_reaches_no_rank(placement: Placement) -> None:
    with pytest.raises(ValueError, match="probe has 4 ranks, the placement has 2 for it"):
        Probes(role="probe", degrees=ParallelDegrees(4), placement=placement)
    with Probes(role="single", degrees=ParallelDegrees(1), placement=placement) as role:
        with pytest.raises(ValueError, match=r"Probe has no registered method 'not_registered'; it has .*sum_of_ranks"):
            role.not_registered()
        with pytest.raises(TypeError, match="missing a required argument: 'how'"):
            role.fail_on(1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="needs a DataProto argument"):
            role.rows([1, 2])  # type: ignore[arg-type]
        assert role.environment()[0]["RANK"] == "0"


@pytest.mark.parametrize(
    ("how", "account"),
    [
        ("holds lock", r'(?s)probes.py", line \d+, in fail.*HoldsLock: heads 3 do not divide by tp 2'),
        ("memory", r'(?s)probes.py", line \d+, in fail.*MemoryError'),
        (
            "sigkill",
            "The actor died unexpectedly",
        ),  # Also what the kernel does to a process that takes too much memory.
        ("exit", "The actor died unexpectedly"),
        ("exit_actor", r"(?s)The actor (died|is dead).*exit_actor"),
    ],
)
def test_failure_of_one_rank_while_its_peer_waits_in_a_collective(placement: Placement, how: str, account: str) -> None:
    """The collective would wait for half an hour, so a result at all shows that the driver has not waited for it."""
    role = joined(placement)
    ranks = processes_of(role.alive())
    with pytest.raises(WorkerFailed, match=account) as failed:
        role.fail_on(1, how)
    assert (failed.value.role, failed.value.rank, failed.value.method) == ("probe", 1, "fail_on")
    wait_for_end(ranks)
    with pytest.raises(WorkerFailed, match=account):
        role.alive()


def wait_for_answer_of(rank: int, call: PendingCall) -> None:
    ray.wait([ref for ref, of in call.pending.items() if of == rank])


def test_death_of_a_rank_that_has_already_answered(placement: Placement) -> None:
    role = joined(placement)
    ranks = processes_of(role.alive())
    call = role.meet_without.submit(1)
    wait_for_answer_of(1, call)
    ranks[1].kill()
    with pytest.raises(WorkerFailed, match="The actor died") as failed:
        call.result()
    assert failed.value.rank == 1


def test_death_in_another_cluster_ends_the_wait(placement: Placement) -> None:
    single, other = (Probes(role=role, degrees=ParallelDegrees(1), placement=placement) for role in ("single", "other"))
    ranks = processes_of(other.alive())
    call = single.wait_on.submit(0)
    kill(ranks)
    with pytest.raises(WorkerFailed, match="The actor died") as failed:
        call.result()
    assert failed.value.role == "other"


def test_worker_that_cannot_be_made(placement: Placement) -> None:
    role = probes(placement, worker_kwargs={"bad_rank": 1})
    with pytest.raises(WorkerFailed, match="ValueError: rank 1 cannot be made") as failed:
        role.cluster.ready()
    assert failed.value.rank == 1


def test_timeout_names_the_missing_rank_and_stops_the_actors(placement: Placement) -> None:
    role = probes(placement)
    ranks = processes_of(role.alive())
    waiting = role.wait_on.submit(1)
    wait_for_answer_of(0, waiting)
    with pytest.raises(CallTimedOut, match=r"wait_on did not end within 0.5 s; no answer from rank 1 \(of 2\)"):
        waiting.result(timeout=0.5)
    wait_for_end(ranks)


@pytest.mark.parametrize("step", ["route", "PendingCall.result"])
def test_ctrl_c_on_either_side_of_the_wait_stops_the_cluster(
    placement: Placement, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """While a call is sent, and before its result is waited for: also then some ranks may wait for others."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    role = probes(placement)
    ranks = processes_of(role.alive())
    monkeypatch.setattr(f"roll.workers.calls.{step}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        role.meet_without(1)
    wait_for_end(ranks)
    with pytest.raises(WorkerError, match="the probe cluster was stopped"):
        role.alive()


def test_ctrl_c_stops_all_processes() -> None:
    """A driver with a Ray of its own gets the signal that a terminal sends: to its whole process group."""
    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("interrupted_driver.py"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    try:
        pids = {int(pid) for pid in driver.stdout.readline().split()}
        assert pids, driver.communicate(timeout=PATIENCE_S)[1]
        children = descendants(driver.pid)
        assert len(pids) == 2 and pids <= {child.pid for child in children}
        os.killpg(driver.pid, signal.SIGINT)
        output, errors = driver.communicate(timeout=PATIENCE_S)
        assert output == "interrupted\nthe probe cluster was stopped\n", errors
        assert driver.returncode == 0
        wait_for_end(children)
    finally:
        end(driver)
