"""`get_data_input` over the groups of a parallel state; it needs no model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll.parallel.state import ParallelState
from roll.protocol import BROADCAST, BatchDelivery, RollCall, RowDelivery


def batch_delivery(
    state: ParallelState, *, device: torch.device, timeout_s: float = 60.0, rows: RowDelivery = BROADCAST
) -> BatchDelivery:
    """The delivery of each data-parallel share, in two levels: over the tensor x context ranks of the first stage, then
    along each pipeline. Every rank of the world makes one, in the same order.

    Args:
        timeout_s: how long ranks that have come wait for the others of their share.
        rows: which ranks of a share are given its rows.
    """
    degrees, rank = state.degrees, state.rank
    world = dist.group.WORLD
    assert world is not None
    store: Any = world.get_group_store()  # torch's types do not know `clone`

    def roll_call(ranks: list[int], name: str, timeout_s: float) -> RollCall:
        # A clone is a connection of its own: a wait on it holds up no other thread, such as a group that connects.
        return RollCall(store.clone(), ranks, rank, name, timeout_s)

    share = roll_call(degrees.group_of(rank, "tp-cp-pp"), f"model-parallel group of dp {state.at.dp}", timeout_s)
    leaders = None
    if state.is_leader and degrees.dp > 1:
        # Twice: a leader tells the others only when it has waited for the ranks of its own share.
        leaders = roll_call(list(degrees.leaders), "leaders of the data-parallel shares", 2 * timeout_s)
    levels = [state.tp_cp, state.pp] if state.is_first_stage else [state.pp]
    return BatchDelivery(share, levels, leaders=leaders, device=device, rows=rows)
