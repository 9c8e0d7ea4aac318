"""Which rank gets which arguments, and whose results come back.

Pure functions over the ranks of `ParallelDegrees`: no Ray, no torch.distributed. A worker method carries its rule
(`@register`), the cluster calls `route` before it sends and `gather` after it received.

    rule                 arguments                                         results
    ONE_TO_ALL           the same to every rank                            a list in rank order
    RANK_ZERO            the same to every rank                            the result of rank 0
    STAGE_LEADERS        the same to every rank                            tp 0, cp 0, dp 0 of each stage, in order
    DP_MP_COMPUTE        its data-parallel share to every rank             as below
    DP_MP_DISPATCH_FIRST the share to tp 0, cp 0, pp 0 of each data-       tp 0, cp 0, last stage of each data-parallel
                         parallel group, a stub with the meta data to      group, in data-parallel order: DataProto are
                         the group's other ranks                           joined, anything else is a list

Every rule calls every rank, since a method may hold collectives. Under the two `DP_MP` rules only `DataProto` arguments
are split: along `plan.rows` if the batch has a micro-batch plan, else in equal chunks. All other arguments go to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from roll.parallel.degrees import ParallelDegrees

if TYPE_CHECKING:
    from roll.protocol import DataProto, MicroBatchPlan

_RULE = "_roll_dispatch"
Method = TypeVar("Method", bound=Callable[..., Any])
Put = Callable[[Any], Any]


class Dispatch(Enum):
    """How a method is called on the ranks of a cluster; the table above says what each rule does."""

    ONE_TO_ALL = "one_to_all"
    RANK_ZERO = "rank_zero"
    STAGE_LEADERS = "stage_leaders"
    DP_MP_COMPUTE = "dp_mp_compute"
    DP_MP_DISPATCH_FIRST = "dp_mp_dispatch_first"

    @property
    def splits(self) -> bool:
        """Whether `DataProto` arguments are split over the data-parallel groups."""
        return self in (Dispatch.DP_MP_COMPUTE, Dispatch.DP_MP_DISPATCH_FIRST)


def register(dispatch: Dispatch) -> Callable[[Method], Method]:
    """Mark a worker method as callable from the driver, under this rule.

    A subclass that overrides the method keeps its rule unless it registers the method anew.
    """

    def mark(method: Method) -> Method:
        setattr(method, _RULE, dispatch)
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, Dispatch]:
    """The methods of a worker class that the driver may call, with their rules."""
    methods: dict[str, Dispatch] = {}
    for base in reversed(worker_cls.__mro__):
        methods |= {name: getattr(entry, _RULE) for name, entry in vars(base).items() if hasattr(entry, _RULE)}
    return dict(sorted(methods.items()))


def rule_of(worker_cls: type, method: str) -> Dispatch:
    """The rule of one method. Raises ValueError, with the known names, if it is not registered."""
    methods = registered_methods(worker_cls)
    if method not in methods:
        raise ValueError(f"{worker_cls.__name__} has no registered method {method!r}; it has {', '.join(methods)}")
    return methods[method]


@dataclass(frozen=True)
class RankArguments:
    """What one rank is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def route(
    dispatch: Dispatch,
    degrees: ParallelDegrees,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    put: Put = lambda value: value,
) -> list[RankArguments]:
    """The arguments of every rank, in rank order.

    `put` is called once for each distinct value (an argument that goes to all, one share, one stub) and may replace it
    by a handle, such as a reference into an object store, which all receivers share.

    Raises ValueError when a split rule gets no batch, or a batch that does not divide among the data-parallel groups.
    """
    if dispatch.splits:
        _check_batches(degrees, [*args, *kwargs.values()])

    def spread(value: Any) -> list[Any]:
        if dispatch.splits and _is_batch(value):
            return _spread_shares(dispatch, degrees, value, put)
        return [put(value)] * degrees.world_size

    columns = [spread(value) for value in args]
    named = {name: spread(value) for name, value in kwargs.items()}
    return [
        RankArguments(
            args=tuple(column[rank] for column in columns),
            kwargs={name: column[rank] for name, column in named.items()},
        )
        for rank in range(degrees.world_size)
    ]


def reporting_ranks(dispatch: Dispatch, degrees: ParallelDegrees) -> tuple[int, ...]:
    """The ranks whose results are read, in the order in which `gather` takes them."""
    if dispatch.splits:
        return degrees.reporters
    if dispatch is Dispatch.RANK_ZERO:
        return (0,)
    if dispatch is Dispatch.STAGE_LEADERS:
        return tuple(degrees.rank_at(pp=stage) for stage in range(degrees.pp))
    return tuple(range(degrees.world_size))


def gather(dispatch: Dispatch, results: Sequence[Any], plan: MicroBatchPlan | None = None) -> Any:
    """The value of a call, from the results of `reporting_ranks` in that order.

    `plan` is the plan of the batch that was sent (`plan_of`): joined rows go back to the order that they had before.
    Raises ValueError if the joined result does not have one row for each row of the plan.
    """
    if dispatch is Dispatch.RANK_ZERO:
        return results[0]
    if not dispatch.splits or not all(map(_is_batch, results)):
        return list(results)
    joined: DataProto = type(results[0]).concat(list(results))
    return joined if plan is None else plan.restore(joined)


def plan_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> MicroBatchPlan | None:
    """The micro-batch plan that the batches among the arguments were made with, if any."""
    plans = (value.plan for value in (*args, *kwargs.values()) if _is_batch(value))
    return next((plan for plan in plans if plan is not None), None)


def _is_batch(value: object) -> TypeGuard[DataProto]:
    # Imported here, since every actor imports this module for `register`, and not all of them see a batch.
    from roll.protocol import DataProto

    return isinstance(value, DataProto)


def _check_batches(degrees: ParallelDegrees, values: Sequence[Any]) -> None:
    """Refuse what cannot be split, before any rank is called."""
    batches = [value for value in values if _is_batch(value)]
    if not batches:
        raise ValueError("a rule that splits per data-parallel group needs a DataProto argument, and got none")
    plan = batches[0].plan
    if any(batch.plan != plan for batch in batches):
        raise ValueError("the batches of one call must share one micro-batch plan")
    for batch in batches:
        if plan is None:
            if len(batch) % degrees.dp:
                raise ValueError(f"a batch of {len(batch)} rows does not divide among dp {degrees.dp} groups")
            continue
        if plan.dp_size != degrees.dp:
            raise ValueError(f"the micro-batch plan is for dp {plan.dp_size}, the cluster has dp {degrees.dp}")
        if plan.num_rows != len(batch):
            raise ValueError(f"the micro-batch plan has {plan.num_rows} rows, the batch has {len(batch)}")


def _spread_shares(dispatch: Dispatch, degrees: ParallelDegrees, batch: DataProto, put: Put) -> list[Any]:
    """One entry for each rank: the share of its data-parallel group, or the stub."""
    plan = batch.plan
    pieces = batch.chunk(degrees.dp) if plan is None else [batch.select_idxs(rows) for rows in plan.rows]
    # The plan names the micro-batches of every share of the whole batch, so each share carries all of it.
    shares = [piece.with_plan(plan).with_normalizers(batch.normalizers) for piece in pieces]
    placed = [put(share) for share in shares]
    groups = [degrees.coordinates(rank).dp for rank in range(degrees.world_size)]
    if dispatch is Dispatch.DP_MP_COMPUTE:
        return [placed[group] for group in groups]
    stub = put(batch.stub())
    return [placed[group] if rank in degrees.leaders else stub for rank, group in enumerate(groups)]
