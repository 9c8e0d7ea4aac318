"""The arguments of every rank, and the value of a call: what a dispatch rule means.

Pure functions over the ranks of `ParallelDegrees`: nothing is sent here. A call begins with `route` and ends with
`gather`.

Under the two `DP_MP` rules only `DataProto` arguments are split: along `plan.rows` if the batch has a micro-batch plan,
else in equal chunks. All other arguments go to all. A `DataProtoFuture` is a batch too, whose rows stay where they are
until a rank that is given a share of them fetches it; it has neither plan nor normalizers, and is not filled up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from roll.errors import UserError
from roll.parallel.degrees import ParallelDegrees
from roll.protocol.row_delivery import BROADCAST, RowDelivery
from roll.workers.dispatch import Dispatch, Rule
from roll.workers.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from roll.protocol import DataProto, DataProtoFuture, MicroBatchPlan

Put = Callable[[Any], Any]


@dataclass(frozen=True)
class RankArguments:
    """Arguments of one rank's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """Rows of the caller, to whose number and order the results are brought back."""

    plan: MicroBatchPlan | None = None
    num_rows: int = 0
    padding: int = 0
    """Rows that were added at the end, so that the batch divides."""

    def share_sizes(self, dp: int) -> list[int]:
        """The rows of each share."""
        if self.plan is not None:
            return [len(rows) for rows in self.plan.rows]
        return [(self.num_rows + self.padding) // dp] * dp


def route(
    rule: Rule,
    degrees: ParallelDegrees,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    put: Put = lambda value: value,
    delivery: RowDelivery = BROADCAST,
) -> tuple[list[RankArguments], Sent]:
    """The arguments of every rank, in rank order, and what `gather` must know of the batch among them.

    Args:
        put: called once for each distinct value (an argument that goes to all, one share, one stub); it may replace it
            by a handle, such as a reference into an object store, which all receivers share.
        delivery: which ranks of a group get the rows of its share under DP_MP_DISPATCH_FIRST. The others get a stub.

    Raises:
        ValueError: a rule that splits gets no batch, one that lacks a field or does not divide among the data-parallel
            groups, or a DataProtoFuture made without heads where some ranks get a stub; or ALL_TO_ALL gets something
            else than lists with one entry for each rank.
    """
    sent = _check_batches(rule, degrees, [*args, *kwargs.values()]) if rule.dispatch.splits else Sent()

    def spread(value: Any) -> list[Any]:
        if rule.dispatch is Dispatch.ALL_TO_ALL:
            return [put(entry) for entry in _entries(value, degrees.world_size)]
        if rule.dispatch.splits and _is_remote(value):
            future = value if rule.fields is None else value.select(rule.fields)
            return _spread_shares(rule, degrees, future.chunk(degrees.dp), value.stub, put, delivery)
        if rule.dispatch.splits and _is_batch(value):
            read = value if rule.fields is None else value.select_fields(rule.fields)
            return _spread_shares(rule, degrees, _shares(read, degrees.dp, sent), value.stub, put, delivery)
        return [put(value)] * degrees.world_size

    columns = [spread(value) for value in args]
    named = {name: spread(value) for name, value in kwargs.items()}
    calls = [
        RankArguments(
            args=tuple(column[rank] for column in columns),
            kwargs={name: column[rank] for name, column in named.items()},
        )
        for rank in range(degrees.world_size)
    ]
    return calls, sent


def reporting_ranks(rule: Rule, degrees: ParallelDegrees) -> tuple[int, ...]:
    """The ranks whose results are read, in the order in which `gather` takes them."""
    if rule.dispatch.splits:
        return degrees.reporters
    if rule.dispatch is Dispatch.RANK_ZERO:
        return (0,)
    if rule.dispatch is Dispatch.STAGE_LEADERS:
        return tuple(degrees.rank_at(pp=stage) for stage in range(degrees.pp))
    return tuple(range(degrees.world_size))


def gather(rule: Rule, results: Sequence[Any], sent: Sent) -> Any:
    """The value of a call, from the results of `reporting_ranks` in that order.

    Rows of a method registered with `returns_batch` are joined: in the order that the caller's batch had, without those
    that only filled it up. Results of other methods are a list.

    Raises ValueError if a result is no DataProto where one was promised or is needed, or does not have one row for each
    row of its planned or padded share.
    """
    if rule.dispatch is Dispatch.RANK_ZERO:
        return results[0]
    if rule.dispatch.splits and all(isinstance(result, RemoteBatch) for result in results):
        from roll.protocol import DataProtoFuture

        refs, sizes, heads = zip(*((result.ref, result.num_rows, result.head) for result in results), strict=True)
        return DataProtoFuture.concat(refs, sizes, heads)
    kinds = ", ".join(sorted({type(result).__name__ for result in results}))
    if not rule.returns_batch:
        if sent.padding and any(result is not None for result in results):
            hint = "; register it with returns_batch=True" if any(map(_is_batch, results)) else ""
            raise UserError(f"a method with uneven='pad' must return a DataProto, got {kinds}{hint}")
        return list(results)
    if not all(map(_is_batch, results)):
        raise UserError(f"a method registered with returns_batch=True must return a DataProto, got {kinds}")
    if sent.plan is None and not sent.padding:
        return type(results[0]).concat(list(results))
    for dp, (result, size) in enumerate(zip(results, sent.share_sizes(len(results)), strict=True)):
        if len(result) != size:
            raise UserError(f"data-parallel group {dp} returned {len(result)} rows for its share of {size}")
    joined: DataProto = type(results[0]).concat(list(results))
    return joined[: sent.num_rows] if sent.plan is None else sent.plan.restore(joined)


def check_can_stay(method: str, rule: Rule, degrees: ParallelDegrees, values: Sequence[Any]) -> None:
    """Raise ValueError if the results of a call are something else than the rows of its reporters in their order."""
    if not rule.returns_batch:
        raise UserError(f"{method} is not registered with returns_batch=True, so its results cannot stay with workers")
    sent = _check_batches(rule, degrees, values)
    if sent.plan is not None or sent.padding:
        why = "a micro-batch plan" if sent.plan is not None else "rows that only fill it up"
        raise UserError(f"the results of a batch with {why} must be brought back to its order: they cannot stay")


# DataProto is imported in functions: loading torch and TensorDict takes seconds, and a driver may send no batch.


def _is_batch(value: object) -> TypeGuard[DataProto]:
    from roll.protocol import DataProto

    return isinstance(value, DataProto)


def _is_remote(value: object) -> TypeGuard[DataProtoFuture]:
    from roll.protocol import DataProtoFuture

    return isinstance(value, DataProtoFuture)


def _check_batches(rule: Rule, degrees: ParallelDegrees, values: Sequence[Any]) -> Sent:
    """Refuse what cannot be split, before any rank is called; how the batches will be split."""
    batches = [value for value in values if _is_batch(value)]
    futures = [value for value in values if _is_remote(value)]
    if not batches and not futures:
        raise UserError("a rule that splits per data-parallel group needs a DataProto argument, and got none")
    for future in futures:
        if future.num_rows is None:
            raise UserError("a DataProtoFuture is split by its number of rows: make it with sizes")
        if future.num_rows % degrees.dp:
            raise UserError(f"remote rows are not filled up: {future.num_rows} do not divide among dp {degrees.dp}")
    plan = batches[0].plan if batches else None
    if any(batch.plan != plan for batch in batches) or (plan is not None and futures):
        raise UserError("the batches of one call must share one micro-batch plan, and remote ones have none")
    for batch in batches:
        if plan is not None:
            if plan.dp_size != degrees.dp:
                raise UserError(f"the micro-batch plan is for dp {plan.dp_size}, the cluster has dp {degrees.dp}")
            if plan.num_rows != len(batch):
                raise UserError(f"the micro-batch plan has {plan.num_rows} rows, the batch has {len(batch)}")
        elif len(batch) % degrees.dp and rule.uneven == "refuse":
            asked = batch.is_padding_enabled()
            if not asked or not rule.returns_batch:
                hint = "; auto_padding holds for methods registered with returns_batch=True" if asked else ""
                raise UserError(f"a batch of {len(batch)} rows does not divide among dp {degrees.dp} groups{hint}")
    if plan is not None:
        return Sent(plan, plan.num_rows)
    lengths = [len(batch) for batch in batches] + [future.num_rows or 0 for future in futures]
    if any(length % degrees.dp for length in lengths) and len(set(lengths)) > 1:
        raise UserError(f"batches of {', '.join(map(str, lengths))} rows cannot be padded alike")
    return Sent(None, lengths[0], -lengths[0] % degrees.dp)


def _shares(batch: DataProto, dp: int, sent: Sent) -> list[DataProto]:
    """One batch for each data-parallel group."""
    if sent.plan is not None:
        pieces = [batch.select_idxs(rows) for rows in sent.plan.rows]
    elif sent.padding:
        pieces = batch.select_idxs([*range(len(batch)), *[len(batch) - 1] * sent.padding]).chunk(dp)
    else:
        pieces = batch.chunk(dp)
    # The plan names the micro-batches of every share of the whole batch, so each share carries all of it.
    return [piece.with_plan(sent.plan).with_normalizers(batch.normalizers) for piece in pieces]


def _spread_shares(
    rule: Rule,
    degrees: ParallelDegrees,
    shares: Sequence[Any],
    make_stub: Callable[[], DataProto],
    put: Put,
    delivery: RowDelivery,
) -> list[Any]:
    """One entry for each rank: the share of its data-parallel group, or the stub."""
    ranks = range(degrees.world_size)
    groups = degrees.groups("tp-cp-pp")  # Each with its leader, the lowest number, in front.
    whole_group = rule.dispatch is Dispatch.DP_MP_COMPUTE
    receivers = {rank for group in groups for rank in (group if whole_group else delivery.receivers(group))}
    stub = make_stub() if len(receivers) < len(ranks) else None  # It may be refused, so it is made before rows are put.
    placed = [put(share) for share in shares]
    placed_stub = None if stub is None else put(stub)
    return [placed[degrees.coordinates(rank).dp] if rank in receivers else placed_stub for rank in ranks]


def _entries(value: Any, world_size: int) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != world_size:
        got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else type(value).__name__
        raise UserError(f"ALL_TO_ALL takes lists with one entry for each of {world_size} ranks, got {got}")
    return value
