"""Rows that are still with another process, as code sees them that must not load torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.protocol.data_proto import DataProto


class RemoteRows(ABC):
    """Base class of `DataProtoFuture`."""

    @abstractmethod
    def get(self, timeout: float | None = None) -> DataProto:
        """Fetch the rows. Raises TimeoutError if they do not arrive within `timeout` seconds."""

    @abstractmethod
    def references(self) -> Iterator[Hashable]:
        """The references that `get` fetches."""
