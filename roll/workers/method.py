"""A method of a role, typed on both sides of the wire.

    class PolicyWorker(Worker):                                # one rank
        @register(Dispatch.DP_MP_DISPATCH_FIRST)
        def train_policy(self, batch: DataProto) -> Metrics: ...

    class Policy(Role, PolicyWorker):                          # all ranks, as the driver sees them
        "The policy."

    worker.train_policy(batch)                                 # Metrics: the method runs
    policy.train_policy(batch)                                 # list[Metrics]: every rank runs it; waits
    policy.train_policy.submit(batch).result()                 # the same; the driver does other things in between

A type checker knows the arguments, and the value that the dispatch rule makes of the ranks' results. The exception is
ALL_TO_ALL: Python's types cannot say that each argument becomes a list, so its arguments are not checked.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar, overload

from roll.errors import UserError
from roll.workers.calls import PendingCall
from roll.workers.dispatch import Dispatch, Rule, Uneven

if TYPE_CHECKING:
    from roll.protocol import DataProto, DataProtoFuture

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Rows = TypeVar("Rows", bound="DataProto | None")


class Sender(ABC):
    """Sends calls to the ranks of a role."""

    @abstractmethod
    def send(
        self,
        method: RoleMethod[..., Any, T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        leave: bool = False,
    ) -> PendingCall[T]:
        """Send a call to every rank.

        Args:
            leave: whether the rows of the result stay with the workers.

        Raises ValueError for a batch that does not divide, or whose results cannot stay; TypeError for arguments that
        do not fit the method's signature; WorkerError if the ranks have been stopped, or those that hold the rows of a
        DataProtoFuture among the arguments. No rank has been called then, and the role goes on.
        """

    @abstractmethod
    def stopped_by_ctrl_c(self) -> AbstractContextManager[None]:
        """Stop the ranks if Ctrl-C comes inside: ranks that were called would wait for those that were not."""


class Caller:
    """Base class of the driver's side of a role: registered methods of its subclasses are sent to the ranks."""

    cluster: Sender


class RemoteMethod(Generic[P, T]):
    """A method of a role on the driver. `T` is what the dispatch rule makes of the results of the ranks."""

    def __init__(self, sender: Sender, method: RoleMethod[P, Any, T]) -> None:
        self._sender, self._method = sender, method
        self.__doc__ = method.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the method on every rank and wait for its value. Raises as `submit` and `PendingCall.result` do."""
        with self._sender.stopped_by_ctrl_c():
            return self.submit(*args, **kwargs).result()

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> PendingCall[T]:
        """Send the call to every rank; `result()` waits for its value. Raises as `Sender.send` does."""
        return self._sender.send(self._method, args, kwargs)

    def submit_remote(
        self: RemoteMethod[P, DataProto], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[DataProtoFuture]:
        """The same, and the rows of the result stay with the workers: `result()` is a `DataProtoFuture` of them.

        They are there as long as these workers live. Handed to a method that splits its batch (`as_batch`), the future
        is cut without being fetched: each rank fetches the rows of its own share.

        Raises ValueError as well for a method that is not registered with `returns_batch`, and for a batch with a
        micro-batch plan or of uneven shares, whose results would have to be brought back to their order here.
        """
        sent: PendingCall[Any] = self._sender.send(self._method, args, kwargs, leave=True)
        return sent


class RoleMethod(Generic[P, R, T]):
    """A registered method. On a rank it returns `R`; on the driver, `T` (see `RemoteMethod`)."""

    def __init__(self, function: Callable[..., Any], rule: Rule) -> None:
        refuse_generator(function)
        self.__doc__ = function.__doc__
        self.__isabstractmethod__ = getattr(function, "__isabstractmethod__", False)
        self.function, self.rule, self.name = function, rule, getattr(function, "__name__", "")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Caller, owner: type) -> RemoteMethod[P, T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R]: ...

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(instance, Caller):
            return RemoteMethod(instance.cluster, self)
        return MethodType(self.function, instance)

    def check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError, with Python's own message, for a call that does not fit the signature."""
        inspect.signature(self.function).bind(None, *args, **kwargs)


class _EachAnswers(Protocol):
    """Decorator of a method whose value is a list of results."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Awaitable[R]], /
    ) -> RoleMethod[P, Awaitable[R], list[R]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> RoleMethod[P, R, list[R]]: ...


class _OneAnswers(Protocol):
    """Decorator of a method whose value is the result of one rank."""

    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], Awaitable[R]], /) -> RoleMethod[P, Awaitable[R], R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> RoleMethod[P, R, R]: ...


class _RowsAreJoined(Protocol):
    """Decorator of a method whose value is one DataProto. Ranks that do not report may return None."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[Any, P], Awaitable[Rows]], /
    ) -> RoleMethod[P, Awaitable[Rows], DataProto]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[Any, P], Rows], /) -> RoleMethod[P, Rows, DataProto]: ...


class _EachTakesAnEntry(Protocol):
    """Decorator of a method whose arguments on the driver are lists."""

    @overload
    def __call__(self, method: Callable[..., Awaitable[R]], /) -> RoleMethod[..., Awaitable[R], list[R]]: ...
    @overload
    def __call__(self, method: Callable[..., R], /) -> RoleMethod[..., R, list[R]]: ...


_Splits = Literal[Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST]


@overload
def register(dispatch: Literal[Dispatch.ONE_TO_ALL, Dispatch.STAGE_LEADERS]) -> _EachAnswers: ...
@overload
def register(dispatch: Literal[Dispatch.RANK_ZERO]) -> _OneAnswers: ...
@overload
def register(dispatch: Literal[Dispatch.ALL_TO_ALL]) -> _EachTakesAnEntry: ...
@overload
def register(
    dispatch: _Splits, *, uneven: Uneven = ..., fields: Sequence[str] | None = ..., returns_batch: Literal[True]
) -> _RowsAreJoined: ...
@overload
def register(
    dispatch: _Splits,
    *,
    uneven: Uneven = ...,
    fields: Sequence[str] | None = ...,
    returns_batch: Literal[False] = ...,
) -> _EachAnswers: ...


def register(
    dispatch: Dispatch,
    *,
    uneven: Uneven = "refuse",
    fields: Sequence[str] | None = None,
    returns_batch: bool = False,
) -> Any:
    """Make a method of a worker callable from the driver, under this rule (see `Rule`).

    The method may be an `async def`, which the worker awaits: it takes one call at a time, in the order in which they
    were made, as with any other method.

    Raises ValueError for an unknown `uneven`, for fields that are one string, for settings that speak of a batch where
    none is split, and for a generator, whose values would come one at a time.

    A subclass that overrides the method keeps its rule unless it registers the method anew.
    """
    if isinstance(fields, str):
        raise UserError(f"fields are given as a list, got {fields!r}")
    rule = Rule(dispatch, uneven, None if fields is None else tuple(fields), returns_batch)
    return lambda method: RoleMethod(method, rule)


def refuse_generator(method: Callable[..., Any]) -> None:
    """Raise ValueError if calling the method makes a generator, of which nothing has run by then."""
    function = inspect.unwrap(method)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__qualname__", repr(function))
        raise UserError(f"{name} yields, and a call has one result: return a list, or register what does one part")


def registered_methods(worker_cls: type) -> dict[str, RoleMethod[..., Any, Any]]:
    """The methods of a worker class that the driver may call, by name; an override has the rule of what it overrides.

    Raises ValueError for an override that is a generator.
    """
    found: dict[str, RoleMethod[..., Any, Any]] = {}
    for base in reversed(worker_cls.__mro__):
        for name, entry in vars(base).items():
            if isinstance(entry, RoleMethod):
                found[name] = entry
            elif name in found:
                found[name] = RoleMethod(entry, found[name].rule)
                found[name].name = name
    return dict(sorted(found.items()))
