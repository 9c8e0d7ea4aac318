"""How long a batch takes to reach its ranks, against the plain ways: ratios for a person to read.

    python benchmarks/delivery.py [--skip-ray] [--rounds 15] [--megabytes 1 10 100]

All ways are measured in turn, round after round, in the same processes, so that what else the machine does meets all of
them; a ratio is the median of the rounds' ratios, with the first and third quartile. Times are from the moment at which
all ranks are ready to the one at which all have the batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from roll.parallel.degrees import ParallelDegrees
from roll.protocol import ROW_DELIVERIES, BatchDelivery, DataProto, RollCall
from roll.workers import Dispatch, Placement, PlacementLayout, Role, Worker, register, start_ray

CPU = torch.device("cpu")
Ways = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]


def batch_of(megabytes: float) -> DataProto:
    """64 rows with what a policy step reads: ids and masks int64, results fp32, one of them a slice."""
    columns = int(megabytes * 1e6 / 64 / (3 * 8 + 2 * 4))
    tensors = {name: torch.randint(0, 2, (64, columns)) for name in ("input_ids", "attention_mask", "response_mask")}
    tensors |= {"advantages": torch.randn(64, columns), "log_probs": torch.randn(64, columns + 1)[:, 1:]}
    return DataProto.from_dict(tensors)


def measure(ways: Ways, rounds: int, ready: Callable[[], Any]) -> Times:
    """Seconds of each way in each round, after one round that does not count; `ready` brings all ranks together."""
    times: Times = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            ready()
            begun = time.perf_counter()
            way()
            ready()
            if number:
                times[name].append(time.perf_counter() - begun)
    return times


def show(title: str, times: Times, ours: str) -> None:
    """A line for each way, with how many times as long as ours it takes."""
    print(title)
    for name, seconds in times.items():
        ratios = [other / own for other, own in zip(seconds, times[ours], strict=True)]
        first, middle, third = statistics.quantiles(ratios, n=4)
        print(
            f"  {name:<44} {statistics.median(seconds) * 1e3:8.2f} ms   "
            f"{middle:5.2f} x {ours} ({first:.2f} .. {third:.2f})"
        )


def delivery_of(name: str) -> BatchDelivery:
    """Over all ranks of the world, as the tensor-parallel ranks of one stage."""
    world = dist.group.WORLD
    assert world is not None
    call = RollCall(world.get_group_store().clone(), range(dist.get_world_size()), dist.get_rank(), name, 60.0)
    return BatchDelivery(call, [world], device=CPU, rows=ROW_DELIVERIES[name])


def rank_of_broadcasts(rank: int, ranks: int, port: int, rounds: int, sizes: list[float]) -> None:
    """One rank of the comparison of broadcasts."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo")
    way = delivery_of("broadcast")
    for megabytes in sizes:
        whole = batch_of(megabytes)
        batch = whole if rank == 0 else whole.stub()
        num_bytes = sum(tensor.nbytes for tensor in whole.tensors.values())
        sent = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)

        def objects(batch: DataProto = batch) -> None:
            dist.broadcast_object_list([batch.batch], src=0)

        def raw(sent: torch.Tensor = sent) -> None:
            dist.broadcast(sent if rank == 0 else torch.empty_like(sent), src=0)

        def ours(batch: DataProto = batch) -> None:
            way.deliver(batch, non_tensor=False)

        ways: Ways = {"get_data_input": ours, "broadcast_object_list of the batch": objects}
        ways["broadcast of its bytes into fresh memory"] = raw
        times = measure(ways, rounds if megabytes < 100 else max(3, rounds // 3), dist.barrier)
        if rank == 0:
            show(f"{ranks} ranks, {num_bytes / 1e6:.3g} MB", times, "get_data_input")
    dist.destroy_process_group()


class ReceiverWorker(Worker):
    """A tensor-parallel rank without a model."""

    @register(Dispatch.ONE_TO_ALL)
    def start(self) -> None:
        """Join the group."""
        dist.init_process_group("gloo")
        self.ways = {name: delivery_of(name) for name in ROW_DELIVERIES}

    @register(Dispatch.DP_MP_COMPUTE)
    def take(self, data: DataProto) -> None:
        """Only have the batch."""

    @register(Dispatch.DP_MP_DISPATCH_FIRST)
    def get_data_input(self, data: DataProto, name: str) -> None:
        """The whole way."""
        self.ways[name].deliver(data, non_tensor=False)


class Receiver(Role, ReceiverWorker):
    """All ranks."""


def through_ray(rounds: int) -> None:
    """32 MB from the driver to four ranks that share it."""
    data = batch_of(32)
    start_ray(None, num_cpus=4)
    with Placement(PlacementLayout({"receiver": 4})) as placement:
        receiver = Receiver(role="receiver", degrees=ParallelDegrees(4, tp=4), placement=placement)
        receiver.start()
        actors = receiver.cluster.actors.handles

        def copies() -> None:
            ray.get([actor.execute.remote("take", "nothing", data) for actor in actors])

        def one_pickle() -> None:
            reference = ray.put(data)
            ray.get([actor.execute.remote("take", "nothing", reference) for actor in actors])

        def delivered(name: str) -> None:
            receiver.cluster.delivery = ROW_DELIVERIES[name]
            receiver.get_data_input(data, name)

        ours = "a put for each share"
        ways: Ways = {ours: lambda: receiver.take(data), "a copy to each rank": copies}
        show(
            "32 MB through Ray to 4 ranks",
            measure(ways | {"one put, pickled": one_pickle}, rounds, receiver.alive),
            ours,
        )
        ways = {"object_store": lambda: delivered("object_store"), "broadcast": lambda: delivered("broadcast")}
        title = "32 MB from the driver until all 4 ranks have it, by ray.delivery"
        show(title, measure(ways, rounds, receiver.alive), "object_store")
    ray.shutdown()


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.01, 1, 10, 100])
    parser.add_argument("--skip-ray", action="store_true")
    arguments = parser.parse_args()
    for ranks in (2, 4):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(rank_of_broadcasts, (ranks, store.port, arguments.rounds, arguments.megabytes), ranks)
    if not arguments.skip_ray:
        through_ray(arguments.rounds)


if __name__ == "__main__":
    main()
