"""Rules by which the driver calls worker methods; a method carries its rule as a mark.

    rule                 arguments                                         results
    ONE_TO_ALL           the same to every rank                            a list in rank order
    RANK_ZERO            the same to every rank                            the result of rank 0
    ALL_TO_ALL           lists with one entry for each rank                a list in rank order
    STAGE_LEADERS        the same to every rank                            tp 0, cp 0, dp 0 of each stage, in order
    DP_MP_COMPUTE        its data-parallel share to every rank             as below
    DP_MP_DISPATCH_FIRST the share to tp 0, cp 0, pp 0 of each data-       tp 0, cp 0, last stage of each data-parallel
                         parallel group, a stub with the meta data to      group, in data-parallel order: DataProto are
                         the group's other ranks                           joined, anything else is a list

Every rule calls every rank, since a method may hold collectives. `roll.workers.routing` is the arithmetic behind this
table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, get_args

from roll.errors import UserError

_RULE = "_roll_rule"
Method = TypeVar("Method", bound=Callable[..., Any])
Uneven = Literal["refuse", "pad"]


class Dispatch(Enum):
    """Distribution of arguments to ranks, and of results to the driver; the table above defines each rule."""

    ONE_TO_ALL = "one_to_all"
    RANK_ZERO = "rank_zero"
    ALL_TO_ALL = "all_to_all"
    STAGE_LEADERS = "stage_leaders"
    DP_MP_COMPUTE = "dp_mp_compute"
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"

    @property
    def splits(self) -> bool:
        """Whether `DataProto` arguments are split over the data-parallel groups."""
        return self in (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)


@dataclass(frozen=True)
class Rule:
    """Settings of a registered method. Raises ValueError for what has no meaning where no batch is split."""

    dispatch: Dispatch
    uneven: Uneven = "refuse"
    """Treatment of a batch without a plan whose rows do not divide: an error, or copies of its last row fill the
    shares up, and the rows of the result that belong to them are dropped. A batch with `is_padding_enabled` is filled
    up either way, if the method returns a batch."""
    fields: tuple[str, ...] | None = None
    """The fields of a batch, tensors and others, that the method reads, and so all that is sent; None for all."""
    returns_batch: bool = False
    """Whether the reporting ranks return a DataProto each, so that the rows may stay with them
    (`Cluster.submit_remote`)."""

    def __post_init__(self) -> None:
        if self.uneven not in get_args(Uneven):
            raise UserError(f"uneven must be one of {', '.join(get_args(Uneven))}, got {self.uneven!r}")
        if not self.dispatch.splits and (self.uneven != "refuse" or self.fields is not None or self.returns_batch):
            settings = f"uneven={self.uneven!r}, fields={self.fields}, returns_batch={self.returns_batch}"
            raise UserError(f"{settings}: {self.dispatch.name} splits no batch")


def register(
    dispatch: Dispatch,
    *,
    uneven: Uneven = "refuse",
    fields: Sequence[str] | None = None,
    returns_batch: bool = False,
) -> Callable[[Method], Method]:
    """Mark a worker method as callable from the driver, under this rule (see `Rule`).

    The method may be an `async def`, which the worker awaits: it takes one call at a time, in the order in which they
    were made, as with any other method.

    Raises ValueError for an unknown `uneven`, for fields that are one string, for settings that speak of a batch where
    none is split, and for a generator, whose values would come one at a time.

    A subclass that overrides the method keeps its rule unless it registers the method anew.
    """
    if isinstance(fields, str):
        raise UserError(f"fields are given as a list, got {fields!r}")
    rule = Rule(dispatch, uneven, None if fields is None else tuple(fields), returns_batch)

    def mark(method: Method) -> Method:
        refuse_generator(method)
        setattr(method, _RULE, rule)
        return method

    return mark


def refuse_generator(method: Callable[..., Any]) -> None:
    """Raise ValueError if calling the method makes a generator, of which nothing has run by then."""
    function = inspect.unwrap(method)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        name = getattr(function, "__qualname__", repr(function))
        raise UserError(f"{name} yields, and a call has one result: return a list, or register what does one part")


def registered_methods(worker_cls: type) -> dict[str, Rule]:
    """The methods of a worker class that the driver may call, with their rules."""
    methods: dict[str, Rule] = {}
    for base in reversed(worker_cls.__mro__):
        methods |= {name: getattr(entry, _RULE) for name, entry in vars(base).items() if hasattr(entry, _RULE)}
    return dict(sorted(methods.items()))


def rule_of(worker_cls: type, method: str) -> Rule:
    """The rule of one method. Raises ValueError, with the known names, if it is not registered."""
    methods = registered_methods(worker_cls)
    if method not in methods:
        raise UserError(f"{worker_cls.__name__} has no registered method {method!r}; it has {', '.join(methods)}")
    refuse_generator(getattr(worker_cls, method))  # It may override one that is none.
    return methods[method]
