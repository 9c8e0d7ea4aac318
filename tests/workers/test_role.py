"""The two sides of a role without Ray: on a rank a method runs, on the driver it is sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from roll.workers.calls import PendingCall
from roll.workers.dispatch import Dispatch, Rule
from roll.workers.method import RemoteMethod, RoleMethod, Sender, register, registered_methods
from roll.workers.role import OnlyOnRanks, Role
from roll.workers.worker import Worker


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def start(self, name: str) -> list[str]:
        """Base's."""
        return [f"base {name}"]

    @register(Dispatch.RANK_ZERO)
    def stop(self) -> int:
        return self.rank

    def inner(self) -> None: ...


class Derived(Base):
    def start(self, name: str) -> list[str]:
        return [*super().start(name), f"derived {self.rank}"]

    @register(Dispatch.RANK_ZERO)
    async def stop(self) -> int:  # type: ignore[override]
        return 10 + super().stop()


class Bases(Role, Base):
    """All ranks."""


class Deriveds(Role, Derived):
    """All ranks."""


class Recorded(Sender):
    """Keeps what it is asked to send."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Rule, tuple[Any, ...], Mapping[str, Any] | None, bool]] = []

    def send(
        self,
        method: RoleMethod[..., Any, Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        leave: bool = False,
    ) -> PendingCall[Any]:
        self.sent.append((method.name, method.rule, args, kwargs, leave))
        call: PendingCall[Any] = object.__new__(PendingCall)
        return call

    @contextmanager
    def stopped_by_ctrl_c(self) -> Iterator[None]:
        yield


def on_driver(role_cls: type[Role]) -> tuple[Any, Recorded]:
    """A role whose calls go nowhere."""
    role, sender = object.__new__(role_cls), Recorded()
    vars(role)["cluster"] = sender
    return role, sender


def rules(worker_cls: type[Worker]) -> dict[str, Rule]:
    of_all = registered_methods(Worker)
    return {name: method.rule for name, method in registered_methods(worker_cls).items() if name not in of_all}


def test_registered_methods_follow_inheritance() -> None:
    assert rules(Base) == {"start": Rule(Dispatch.ONE_TO_ALL), "stop": Rule(Dispatch.RANK_ZERO)}
    assert rules(Derived) == rules(Base)
    with pytest.raises(
        ValueError, match="Derived has no registered method 'inner'; it has address, alive, join, start, stop"
    ):
        on_driver(Deriveds)[0].inner()


def test_on_a_rank_a_method_runs() -> None:
    base = Base(role="a", rank=3, world_size=4)
    assert base.start("x") == ["base x"] and base.stop() == 3
    derived = Derived(role="a", rank=3, world_size=4)
    assert derived.start("x") == ["base x", "derived 3"]
    coroutine: Any = derived.stop()
    with pytest.raises(StopIteration, match="13"):
        coroutine.send(None)


def test_on_the_driver_a_method_is_sent() -> None:
    for role_cls in (Bases, Deriveds):
        role, sender = on_driver(role_cls)
        assert isinstance(role.start, RemoteMethod)
        role.start.submit("x")
        role.start.submit(name="y")
        role.stop.submit()
        start, stop = Rule(Dispatch.ONE_TO_ALL), Rule(Dispatch.RANK_ZERO)
        assert sender.sent == [
            ("start", start, ("x",), {}, False),
            ("start", start, (), {"name": "y"}, False),
            ("stop", stop, (), {}, False),
        ]
    assert Bases.start.__doc__ == on_driver(Bases)[0].start.__doc__ == "Base's."


def test_nothing_of_a_worker_is_on_the_driver() -> None:
    role, _ = on_driver(Deriveds)
    for name in ("inner", "execute", "rank", "role"):
        with pytest.raises(OnlyOnRanks, match=f"Derived has no registered method '{name}'"):
            getattr(role, name)
        assert not hasattr(role, name)
    assert copy.copy(role).cluster is role.cluster


def test_a_role_names_its_worker_class() -> None:
    assert (Bases.worker_cls, Deriveds.worker_cls) == (Base, Derived)
    with pytest.raises(ValueError, match="Nothing names no worker class"):
        type("Nothing", (Role,), {})
    with pytest.raises(ValueError, match=r"Clash\.cluster: a Role has this name, so a worker cannot"):
        type("Clashes", (Role, type("Clash", (Worker,), {"cluster": 3})), {})
