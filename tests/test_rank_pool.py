"""The pool of ranks: results, failures and timeouts arrive, and the pool works afterwards."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import processes_of, wait_for_end, wait_until
from tests.rank_pool import RankError, RankPool


def sum_of_ranks(scale: float, *, offset: float = 0.0) -> tuple[int, torch.Tensor]:
    value = torch.tensor([scale * (dist.get_rank() + 1) + offset])
    dist.all_reduce(value)
    return dist.get_rank(), value


def fail_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the cause")
    dist.all_reduce(torch.zeros(1))


def exit_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def wait_on_one(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def pool_of_a_process_that_dies(pids: str) -> None:
    """Run as a process of its own: both ranks write their number and wait, then nobody is left to stop them."""
    pool = RankPool(size=2)
    with pytest.raises(RankError):  # never: the process is killed before
        pool.run(write_pid_and_wait, pids)


def write_pid_and_wait(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    threading.Event().wait()


def threads_and_group() -> tuple[str, int, int]:
    return os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), dist.get_world_size()


def return_a_view() -> torch.Tensor:
    return torch.arange(6).view(2, 3)[:, 1]


def destroy_the_group_itself() -> int:
    dist.destroy_process_group()
    return os.getpid()


@pytest.mark.parametrize(("world_size", "total"), [(1, 2.5), (2, 7.0), (4, 22.0)])
def test_all_reduce_sums_over_the_ranks(ranks: RankPool, world_size: int, total: float) -> None:
    # sum over r of 2 * (r + 1) + 0.5
    results = ranks.run(sum_of_ranks, 2.0, offset=0.5, world_size=world_size)
    assert [rank for rank, _ in results] == list(range(world_size))
    assert [value.item() for _, value in results] == [total] * world_size


def test_every_rank_computes_with_one_thread(ranks: RankPool) -> None:
    assert ranks.run(threads_and_group, world_size=2) == [("1", 1, 2)] * 2


def test_tensors_come_back_by_value(ranks: RankPool) -> None:
    for result in ranks.run(return_a_view, world_size=2):
        assert torch.equal(result, torch.tensor([1, 4]))


def test_a_job_may_destroy_its_group(ranks: RankPool) -> None:
    first = ranks.run(destroy_the_group_itself, world_size=2)
    assert ranks.run(destroy_the_group_itself, world_size=2) == first  # the same two processes


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_rank_is_reported_at_once_while_its_peer_waits(ranks: RankPool, failing: int) -> None:
    before = ranks.run(destroy_the_group_itself, world_size=2)
    # The collective would wait 300 s; the job's own limit shows that nothing waited for it.
    with pytest.raises(RankError, match="KeyError: 'the cause'") as caught:
        ranks.run(fail_on_one, failing, world_size=2, timeout=200)
    assert caught.value.rank == failing
    assert "fail_on_one" in caught.value.traceback
    assert set(ranks.run(destroy_the_group_itself, world_size=2)).isdisjoint(before)
    assert [value.item() for _, value in ranks.run(sum_of_ranks, 1.0, world_size=4)] == [10.0] * 4


def test_a_rank_that_dies_is_reported_with_its_exit_code(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="exit code 3") as caught:
        ranks.run(exit_on_one, 1, world_size=2)
    assert caught.value.rank == 1


def test_a_stuck_rank_is_reported_with_its_stack(ranks: RankPool) -> None:
    ranks.run(sum_of_ranks, 1.0, world_size=2)  # a new process imports this module first, which takes its time
    with pytest.raises(RankError, match="no result after 5 s") as caught:
        ranks.run(wait_on_one, 1, world_size=2, timeout=5)
    assert caught.value.rank == 1
    assert "wait_on_one" in caught.value.traceback
    assert len(ranks.run(sum_of_ranks, 1.0, world_size=2)) == 2


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    owner = multiprocessing.get_context("spawn").Process(target=pool_of_a_process_that_dies, args=(str(tmp_path),))
    owner.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2 or not owner.is_alive())
    members = processes_of(int(path.name) for path in tmp_path.iterdir())
    assert len(members) == 2
    owner.kill()
    owner.join()
    wait_for_end(members)


def test_more_ranks_than_processes_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match=r"world_size=9 .* 8 processes"):
        ranks.run(sum_of_ranks, 1.0, world_size=9)
