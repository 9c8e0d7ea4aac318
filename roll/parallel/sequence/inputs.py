"""What a dispatched model is called with, on all ranks together.

Legend: b rows, s tokens of this rank's part, n ranks, N = n * s tokens of a whole row.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.parallel.sequence.agreement import agree
from roll.parallel.sequence.segments import Documents, find_documents


def find_inputs(
    config: Any, given: dict[str, Any], group: ProcessGroup | None, problem: str | None = None
) -> tuple[Documents, dict[str, Any]]:
    """The documents of the batch, and the decoder's arguments completed.

    Completed, because transformers would count positions from 0 in every part, and find documents in the positions of
    one part: with a mask (here of the whole rows) it leaves that to us. No cache: it would hold a part.

    Raises:
        ValueError: on every rank, if one of them (or `problem`, from before) has something that cannot be split, or if
            the ranks do not have the same shapes, mask and cu_seq_lens.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    problem = problem or _problem(config, given, tokens, ranks)
    mask, cu_seqlens, positions = (given.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    agree(
        group,
        problem,
        shape=None if tokens is None else tuple(tokens.shape[:2]),
        attention_mask=_digest(mask),
        cu_seq_lens_q=_digest(cu_seqlens),
        position_ids=None if positions is None else tuple(positions.shape),
    )
    assert tokens is not None
    rows, size = tokens.shape[:2]
    length, device = ranks * size, tokens.device
    counted = torch.arange(rank * size, (rank + 1) * size, device=device).unsqueeze(0)
    documents = find_documents(
        rows,
        length,
        device,
        cu_seqlens=cu_seqlens,
        position_ids=_whole(positions, group).expand(rows, -1) if positions is not None and mask is None else None,
        attention_mask=mask,
    )
    return documents, given | {
        "attention_mask": torch.ones(rows, length, dtype=torch.bool, device=device) if mask is None else mask,
        "position_ids": counted if positions is None else positions,
        "use_cache": False,
    }


def _problem(config: Any, given: dict[str, Any], tokens: Any, ranks: int) -> str | None:
    """What this rank cannot go on with."""
    if tokens is None:
        return "the model was called without input_ids and inputs_embeds"
    rows, size = tokens.shape[:2]
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if size == 0:
        return "the model was called with parts of no tokens"
    if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, ranks * size)):
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        return (
            f"attention_mask must be that of the whole rows, {(rows, ranks * size)} for {ranks} parts of "
            f"{size} tokens, got {shape}: it is not split"
        )
    if positions is not None and (positions.ndim != 2 or len(positions) not in (1, rows) or positions.shape[1] != size):
        return f"position_ids must be those of this rank's part, {(rows, size)}, got {tuple(positions.shape)}"
    keys = given.get("cu_seq_lens_k")
    if keys is not None and _digest(keys) != _digest(given.get("cu_seq_lens_q")):
        return "cu_seq_lens_q and cu_seq_lens_k must be the same: tokens attend to themselves"
    if given.get("use_cache") or given.get("past_key_values") is not None or given.get("cache") is not None:
        return "a dispatched model has no cache, so it cannot generate: undispatch_modules it first"
    for name, reason in (
        ("output_attentions", "no rank has all attention weights"),
        ("output_router_logits", "the load-balancing loss of a whole batch is not the sum of its parts'"),
    ):
        wanted = given.get(name)
        if getattr(config, name, False) if wanted is None else wanted:
            return f"{name} is not supported: {reason}"
    return None


def _digest(tensor: Tensor | None) -> str | None:
    """What ranks compare instead of the values, with the shape."""
    if tensor is None:
        return None
    values = tensor.detach().cpu().long().contiguous().numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.sha256(values).hexdigest()[:12]}"


def _whole(positions: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[b, s]` of every rank to `[b, N]`."""
    if group is None or group.size() == 1:
        return positions
    parts = [torch.empty_like(positions) for _ in range(group.size())]
    dist.all_gather(parts, positions.contiguous(), group=group)
    return torch.cat(parts, dim=1)
