"""Ranks in a ring, each of which hands something to the next while it works on what it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup


class Ring:
    """The ranks of a group in their order, the first behind the last."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self._next, self._previous = (dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1))

    def pass_on(self, x: Tensor) -> Arriving:
        """Begin to send `x` to the next rank, and to receive its like from the previous one.

        Collective. Nobody may change `x` before it has arrived.
        """
        x = x.contiguous()
        received = torch.empty_like(x)
        exchange = [
            P2POp(dist.isend, x, self._next, self.group),
            P2POp(dist.irecv, received, self._previous, self.group),
        ]
        return Arriving(received, x, dist.batch_isend_irecv(exchange))


@dataclass
class Arriving:
    """A tensor on its way."""

    received: Tensor
    sent: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What the previous rank sent, when it is there and this rank's own is gone."""
        for work in self.works:
            work.wait()
        return self.received
