"""A batch with its plan, its share cut into micro-batches, and results back in the share's row order."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.config import MicroBatchSettings
from roll.data.plan import plan_micro_batches
from roll.errors import UserError
from roll.protocol import DataProto


def with_plan(batch: DataProto, dp_size: int, settings: MicroBatchSettings) -> DataProto:
    """The batch with a micro-batch plan for `dp_size` data-parallel ranks, made from the real lengths of its rows."""
    plan = plan_micro_batches(_lengths(batch), dp_size, max_tokens=settings.max_tokens, rows=settings.rows)
    return batch.with_plan(plan)


def cut_micro_batches(
    batch: DataProto, settings: MicroBatchSettings, dp_rank: int
) -> tuple[list[DataProto], list[int]]:
    """The micro-batches of this rank's share, and the share's row numbers in the order in which they appear.

    A plan that came with the batch decides. Without one the share is planned by itself: into micro-batches of
    `meta_info["micro_batch_size"]` rows, in their order, where the batch has that entry, else by `settings`. A
    micro-batch may have no rows; its rank still takes part in what the others do together.

    Raises ValueError if the plan deals this rank another number of rows.
    """
    check_dealt(batch, dp_rank)
    if batch.plan is not None:
        cuts = [list(rows) for rows in batch.plan.shares[dp_rank]]
    else:
        rows = batch.micro_batch_size
        plan = with_plan(batch, 1, settings if rows is None else MicroBatchSettings(rows=rows)).plan
        assert plan is not None
        cuts = [[plan.rows[0][row] for row in rows] for rows in plan.shares[0]]
    return [batch.select_idxs(rows) for rows in cuts], [row for rows in cuts for row in rows]


def check_dealt(batch: DataProto, dp_rank: int, dp_size: int | None = None) -> None:
    """Refuse a batch that is not the share which its plan deals to this data-parallel rank, of `dp_size` if given.

    A whole batch that carries its plan, but was not dealt, would be cut into rows of other ranks' shares.
    """
    if batch.plan is None:
        return
    rows = batch.plan.rows
    if dp_rank >= len(rows) or (dp_size is not None and dp_size != len(rows)):
        raise UserError(
            f"the plan deals to {len(rows)} data-parallel ranks, this is rank {dp_rank} of {dp_size or 'more'}"
        )
    if len(batch) != len(rows[dp_rank]):
        raise UserError(
            f"the plan deals {len(rows[dp_rank])} of {batch.plan.num_rows} rows to data-parallel rank {dp_rank}, its "
            f"batch has {len(batch)}; a rank is given batch.select_idxs(plan.rows[dp_rank]).with_plan(plan)"
        )


def _lengths(batch: DataProto) -> list[int]:
    lengths: list[int] = batch["attention_mask"].sum(dim=1).tolist()
    return lengths


def join_results(results: list[dict[str, Tensor]], order: list[int]) -> dict[str, Tensor]:
    """Results of micro-batches, `[b, ...]` each, as `[B, ...]` in the share's row order."""
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    names = results[0].keys()
    return {name: torch.cat([result[name] for result in results])[back.to(results[0][name].device)] for name in names}
