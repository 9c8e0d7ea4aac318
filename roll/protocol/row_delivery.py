"""The way of the rows of a data-parallel share to the ranks that work on it.

A `RowDelivery` is made once for a role and given to both sides: the driver sends rows to its `receivers`, and the
`BatchDelivery` of the ranks broadcasts to the rest of the share. It needs no torch, since drivers and workers load it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class RowDelivery(ABC):
    """Which ranks of a share are sent its rows. The others are sent a stub, and get the rows from the leader."""

    @abstractmethod
    def receivers(self, share: Sequence[int]) -> Sequence[int]:
        """The ranks that are sent the rows, the leader among them.

        Args:
            share: all ranks that work on the rows, the leader first.
        """


@dataclass(frozen=True)
class ObjectStore(RowDelivery):
    """Every rank takes the rows from Ray's object store. Nothing is broadcast."""

    def receivers(self, share: Sequence[int]) -> Sequence[int]:
        return share


@dataclass(frozen=True)
class Broadcast(RowDelivery):
    """The leader is sent the rows and broadcasts them over the process groups. The only way without Ray."""

    def receivers(self, share: Sequence[int]) -> Sequence[int]:
        return share[:1]


BROADCAST = Broadcast()

ROW_DELIVERIES: Mapping[str, RowDelivery] = {"object_store": ObjectStore(), "broadcast": BROADCAST}
"""The values of the setting `ray.delivery`."""
