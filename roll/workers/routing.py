"""The arguments of every rank, and the value of a call: what a dispatch rule means.

Pure functions over the ranks of `ParallelDegrees`: nothing is sent here. The cluster calls `route` before it
sends and `gather` after it received.

Under the two `DP_MP` rules only `DataProto` arguments are split: along `plan.rows` if the batch has a micro-batch plan,
else in equal chunks. All other arguments go to all. A `DataProtoFuture` is a batch too, whose rows stay where they are
until a rank that is given a share of them fetches it; it has no plan, is not filled up, and brings all its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from roll.config import RowsOn
from roll.parallel.degrees import ParallelDegrees
from roll.workers.dispatch import Dispatch, Rule
from roll.workers.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from roll.protocol import DataProto, DataProtoFuture, MicroBatchPlan

Put = Callable[[Any], Any]


@dataclass(frozen=True)
class RankArguments:
    """What one rank is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """What the results must be brought back to: the rows that the caller has, in the caller's order."""

    plan: MicroBatchPlan | None = None
    num_rows: int = 0
    padding: int = 0
    """Rows that were added at the end, so that the batch divides."""


def route(
    rule: Rule,
    degrees: ParallelDegrees,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    put: Put = lambda value: value,
    rows_on: RowsOn = "leader",
) -> tuple[list[RankArguments], Sent]:
    """The arguments of every rank, in rank order, and what `gather` must know of the batch among them.

    Args:
        put: called once for each distinct value (an argument that goes to all, one share, one stub); it may replace it
            by a handle, such as a reference into an object store, which all receivers share.
        rows_on: with `every_rank`, DP_MP_DISPATCH_FIRST gives all ranks of a group its share, and no stub: for workers
            that all take their rows from the object store, and broadcast nothing.

    Raises:
        ValueError: a rule that splits gets no batch, one that lacks a field or does not divide among the data-parallel
            groups; or ALL_TO_ALL gets something else than lists with one entry for each rank.
    """
    sent = _check_batches(rule, degrees, [*args, *kwargs.values()]) if rule.dispatch.splits else Sent()

    def spread(value: Any) -> list[Any]:
        if rule.dispatch is Dispatch.ALL_TO_ALL:
            return [put(entry) for entry in _entries(value, degrees.world_size)]
        if rule.dispatch.splits and _is_remote(value):
            shares = [put(share) for share in value.chunk(degrees.dp)]
            return _spread_shares(rule, degrees, shares, _empty_batch(), put, rows_on)
        if rule.dispatch.splits and _is_batch(value):
            shares = [put(share) for share in _shares(_read(value, rule.fields), degrees.dp, sent)]
            return _spread_shares(rule, degrees, shares, value, put, rows_on)
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

    Joined rows go back to the order that the caller's batch had, without those that only filled it up.
    Raises ValueError if a result of a planned or padded batch does not have one row for each row of that batch.
    """
    if rule.dispatch is Dispatch.RANK_ZERO:
        return results[0]
    if rule.dispatch.splits and all(isinstance(result, RemoteBatch) for result in results):
        from roll.protocol import DataProtoFuture

        return DataProtoFuture.concat([result.ref for result in results], sizes=[result.num_rows for result in results])
    if not rule.dispatch.splits or not all(map(_is_batch, results)):
        if sent.padding and any(result is not None for result in results):
            kinds = ", ".join(sorted({type(result).__name__ for result in results}))
            raise ValueError(f"a method with uneven='pad' must return a DataProto, got {kinds}")
        return list(results)
    joined: DataProto = type(results[0]).concat(list(results))
    if sent.plan is not None:
        return sent.plan.restore(joined)
    if not sent.padding:
        return joined
    if len(joined) != sent.num_rows + sent.padding:
        raise ValueError(f"{len(joined)} rows of results for {sent.num_rows} rows and {sent.padding} of padding")
    return joined[: sent.num_rows]


def check_can_stay(rule: Rule, sent: Sent) -> None:
    """Raise ValueError if the results of a call are more than the rows of its reporters in their order."""
    if not rule.dispatch.splits:
        raise ValueError(f"{rule.dispatch.name} joins no batches, so that its results cannot stay with the workers")
    if sent.plan is not None or sent.padding:
        why = "a micro-batch plan" if sent.plan is not None else "rows that only fill it up"
        raise ValueError(f"the results of a batch with {why} must be brought back to its order: they cannot stay")


# Imported in functions, since the driver may send no batch, and the import takes a second.


def _is_batch(value: object) -> TypeGuard[DataProto]:
    from roll.protocol import DataProto

    return isinstance(value, DataProto)


def _is_remote(value: object) -> TypeGuard[DataProtoFuture]:
    from roll.protocol import DataProtoFuture

    return isinstance(value, DataProtoFuture)


def _empty_batch() -> DataProto:
    from roll.protocol import DataProto

    return DataProto()


def _check_batches(rule: Rule, degrees: ParallelDegrees, values: Sequence[Any]) -> Sent:
    """Refuse what cannot be split, before any rank is called; how the batches will be split."""
    batches = [value for value in values if _is_batch(value)]
    futures = [value for value in values if _is_remote(value)]
    if not batches and not futures:
        raise ValueError("a rule that splits per data-parallel group needs a DataProto argument, and got none")
    for future in futures:
        if future.num_rows is None:
            raise ValueError("a DataProtoFuture is split by its number of rows: make it with sizes")
        if future.num_rows % degrees.dp:
            raise ValueError(f"remote rows are not filled up: {future.num_rows} do not divide among dp {degrees.dp}")
    plan = batches[0].plan if batches else None
    if any(batch.plan != plan for batch in batches) or (plan is not None and futures):
        raise ValueError("the batches of one call must share one micro-batch plan, and remote ones have none")
    for batch in batches:
        if plan is not None:
            if plan.dp_size != degrees.dp:
                raise ValueError(f"the micro-batch plan is for dp {plan.dp_size}, the cluster has dp {degrees.dp}")
            if plan.num_rows != len(batch):
                raise ValueError(f"the micro-batch plan has {plan.num_rows} rows, the batch has {len(batch)}")
        elif len(batch) % degrees.dp and rule.uneven == "refuse":
            raise ValueError(f"a batch of {len(batch)} rows does not divide among dp {degrees.dp} groups")
    if plan is not None:
        return Sent(plan, plan.num_rows)
    lengths = [len(batch) for batch in batches] + [future.num_rows or 0 for future in futures]
    if any(length % degrees.dp for length in lengths) and len(set(lengths)) > 1:
        raise ValueError(f"batches of {', '.join(map(str, lengths))} rows cannot be padded alike")
    return Sent(None, lengths[0], -lengths[0] % degrees.dp)


def _read(batch: DataProto, fields: tuple[str, ...] | None) -> DataProto:
    """The batch with the fields that a method reads. Raises ValueError, with the known names, if it lacks one."""
    if fields is None:
        return batch
    known = {**batch.tensors, **batch.non_tensor_batch}
    lacking = [name for name in fields if name not in known]
    if lacking:
        raise ValueError(f"the batch lacks {', '.join(lacking)}; it has {', '.join(sorted(known)) or 'no fields'}")
    tensors = [name for name in fields if name in batch.tensors]
    return batch.select(tensors, [name for name in fields if name not in tensors])


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
    rule: Rule, degrees: ParallelDegrees, shares: list[Any], batch: DataProto, put: Put, rows_on: RowsOn
) -> list[Any]:
    """One entry for each rank: the share of its data-parallel group, or the stub."""
    groups = [degrees.coordinates(rank).dp for rank in range(degrees.world_size)]
    if rule.dispatch is Dispatch.DP_MP_COMPUTE or rows_on == "every_rank":
        return [shares[group] for group in groups]
    if len(degrees.leaders) == degrees.world_size:
        return [shares[group] for group in groups]
    stub = put(batch.stub())
    return [shares[group] if rank in degrees.leaders else stub for rank, group in enumerate(groups)]


def _entries(value: Any, world_size: int) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != world_size:
        got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else type(value).__name__
        raise ValueError(f"ALL_TO_ALL takes lists with one entry for each of {world_size} ranks, got {got}")
    return value
