"""A role as the driver sees it: all of its ranks, with the methods of their workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, Self, TypedDict, Unpack

from roll.errors import UserError
from roll.parallel.degrees import ParallelDegrees
from roll.protocol.row_delivery import RowDelivery
from roll.workers.cluster import Cluster
from roll.workers.method import Caller, registered_methods
from roll.workers.placement import Placement
from roll.workers.worker import Worker


class ClusterSettings(TypedDict):
    """Settings of a role's ranks, as `Cluster` describes them."""

    role: str
    degrees: ParallelDegrees
    placement: Placement
    worker_kwargs: NotRequired[Mapping[str, Any]]
    call_timeout_s: NotRequired[float]
    start_timeout_s: NotRequired[float]
    threads: NotRequired[int]
    delivery: NotRequired[RowDelivery]
    log_dir: NotRequired[Path | None]


class Role(Caller):
    """Starts the ranks of a role and calls them. A role is declared beside its worker, and has no code of its own:

        class Critic(Role, CriticWorker):
            "The value function."

        with Critic(role="critic", degrees=..., placement=...) as critic:
            critic.compute_values(batch)

    It inherits from the worker class for the names and types of its methods. Nothing of a worker is in this process:
    registered methods are sent to the ranks, and every other attribute of the worker is refused (`OnlyOnRanks`).

    A context manager, which stops the ranks; so does the placement.
    """

    worker_cls: ClassVar[type[Worker]]
    cluster: Cluster

    def __init__(self, **settings: Unpack[ClusterSettings]) -> None:
        self.cluster = Cluster(self.worker_cls, **settings)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        workers = [base for base in cls.__mro__ if issubclass(base, Worker) and not issubclass(base, Role)]
        if not workers:
            raise UserError(f"{cls.__name__} names no worker class: class {cls.__name__}(Role, SomeWorker)")
        cls.worker_cls = workers[0]
        methods = registered_methods(cls.worker_cls)
        for name in _own_names(cls.worker_cls):
            setattr(cls, name, methods.get(name) or _Refused(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cluster.shutdown()

    if not TYPE_CHECKING:  # A type checker would take any name for an attribute.

        def __getattr__(self, name: str) -> Any:
            raise OnlyOnRanks(type(self), name)


class OnlyOnRanks(UserError, AttributeError):
    """A name that the driver asks of a role, and that is no registered method of its worker class."""

    def __init__(self, role_cls: type[Role], name: str) -> None:
        methods = ", ".join(registered_methods(role_cls.worker_cls))
        super().__init__(f"{role_cls.worker_cls.__name__} has no registered method {name!r}; it has {methods}")


class _Refused:
    """An attribute of a worker class that the driver may not use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Role | None, owner: type[Role]) -> Any:
        raise OnlyOnRanks(owner, self._name)


def _own_names(worker_cls: type[Worker]) -> Iterator[str]:
    """The public names of a worker class and its bases. Raises ValueError for one that `Role` needs for itself."""
    names = {name for base in worker_cls.__mro__ for name in vars(base) if not name.startswith("_")}
    for name in sorted(names):
        if name in ("cluster", "worker_cls"):
            raise UserError(f"{worker_cls.__name__}.{name}: a Role has this name, so a worker cannot")
        yield name
