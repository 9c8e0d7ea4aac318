"""Batches through Ray: a DataProtoFuture passes rows from worker to worker, the driver holds references alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from roll.protocol import DataProto, DataProtoFuture

pytestmark = pytest.mark.usefixtures("local_ray")


@ray.remote(num_cpus=0)
class Holder:
    """Makes rows, and receives them."""

    def rows(self, begin: int, end: int) -> DataProto:
        numbers = torch.arange(begin, end)
        return DataProto.from_dict(
            {"x": numbers, "wide": numbers.to(torch.bfloat16).unsqueeze(1).expand(-1, 5)},
            {"name": [f"row {number}" for number in range(begin, end)]},
            {"metrics": {"begin": begin}},
        )

    def fail(self) -> DataProto:
        raise ArithmeticError("no rows today")

    def wait(self) -> None:
        threading.Event().wait()

    def receive(self, share: DataProtoFuture, timeout: float) -> tuple[list[int], list[str], dict[str, Any]]:
        batch = share.get(timeout)
        assert torch.equal(batch["wide"][:, 0], batch["x"].to(torch.bfloat16))
        return batch["x"].tolist(), list(batch["name"]), batch.meta_info


@pytest.fixture(scope="module")
def holders(local_ray: None) -> Iterator[list[Any]]:
    """Two workers that are up."""
    workers = [Holder.remote() for _ in range(2)]
    ray.get([worker.rows.remote(0, 1) for worker in workers])
    yield workers
    for worker in workers:
        ray.kill(worker)


def test_rows_go_from_worker_to_worker(holders: list[Any]) -> None:
    first, second = holders
    parts = [first.rows.remote(0, 3), second.rows.remote(3, 6)]
    for sizes in ([3, 3], None):
        shares = DataProtoFuture.concat(parts, sizes=sizes).chunk(2)
        received = ray.get(
            [worker.receive.remote(share, 120) for worker, share in zip((second, first), shares, strict=True)]
        )
        assert [rows for rows, _, _ in received] == [[0, 1, 2], [3, 4, 5]]
        assert received[1][1] == ["row 3", "row 4", "row 5"]
    whole = DataProto.materialize_concat(parts, timeout=120)
    assert whole["x"].tolist() == list(range(6)) and whole.meta_info == {"metrics": {"begin": [0, 3]}}


def test_what_arrives_may_be_written_to() -> None:
    reference = ray.put(DataProto.from_dict({"x": torch.zeros(200_000)}))
    DataProto.materialize_concat(reference)["x"].fill_(1)
    ray.get(reference)["x"].fill_(1)
    assert not ray.get(reference)["x"].any()


def test_a_failure_and_a_delay_reach_who_waits(holders: list[Any]) -> None:
    worker, busy = holders
    never = busy.wait.remote()  # the last test, since this worker is of no use any more
    with pytest.raises(ArithmeticError, match="no rows today"):
        DataProtoFuture.concat([never, worker.fail.remote()]).get()
    rows = worker.rows.remote(0, 1)
    ray.wait([rows])
    with pytest.raises(TimeoutError, match=r"1 of 2 parts did not arrive in .*: number \[0\]"):
        DataProtoFuture.concat([never, rows]).get(timeout=0.5)
