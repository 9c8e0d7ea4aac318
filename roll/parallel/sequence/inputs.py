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
    config: Any,
    given: dict[str, Any],
    group: ProcessGroup | None,
    problem: str | None = None,
    facts: dict[str, object] | None = None,
) -> tuple[Documents, dict[str, Any]]:
    """The documents of the batch, and the decoder's arguments completed.

    Completed, because transformers would count positions from 0 in every part, and find documents in the positions of
    one part: with a mask (here of the whole rows) it leaves that to us. No cache: it would hold a part.

    Args:
        problem: of this rank, found before.
        facts: further ones that must be the same on all ranks.

    Raises:
        ValueError: on every rank, if one of them has something that cannot be split (or `problem`), or if the ranks do
            not have the same shapes, mask, cu_seq_lens and `facts`.
    """
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    problem = problem or _problem(config, given, tokens, ranks)
    mask, cu_seqlens, positions = (given.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    if problem is not None:  # what is given may be anything
        agree(group, problem)
    assert isinstance(tokens, Tensor)
    agree(
        group,
        None,
        shape=tuple(tokens.shape[:2]),
        attention_mask=_digest(mask),
        cu_seq_lens_q=_digest(cu_seqlens),
        position_ids=None if positions is None else tuple(positions.shape),
        **(facts or {}),
    )
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
    if given.get("use_cache") or given.get("past_key_values") is not None or given.get("cache") is not None:
        return "a dispatched model has no cache, so it cannot generate: undispatch_modules it first"
    if tokens is None:
        return "the model was called without input_ids and inputs_embeds"
    if not isinstance(tokens, Tensor) or tokens.ndim != (2 if given.get("inputs_embeds") is None else 3):
        return f"input_ids must be [rows, tokens] and inputs_embeds [rows, tokens, size], got {_shape(tokens)}"
    rows, size = tokens.shape[:2]
    if size == 0:
        return "the model was called with parts of no tokens"
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, ranks * size):
            return (
                f"attention_mask must be that of the whole rows, {(rows, ranks * size)} for {ranks} parts of "
                f"{size} tokens, got {_shape(mask)}: it is not split"
            )
        if not ((mask == 0) | (mask == 1)).all():
            return "attention_mask must be of zeros and ones"
    if positions is not None and not (_is_integer(positions) and positions.shape in ((1, size), (rows, size))):
        return f"position_ids must be those of this rank's part, {(rows, size)} integers, got {_shape(positions)}"
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if given.get(name) is not None and not _is_integer(given[name]):
            return f"{name} must be a tensor of integers, got {_shape(given[name])}"
    keys = given.get("cu_seq_lens_k")
    if keys is not None and _digest(keys) != _digest(given.get("cu_seq_lens_q")):
        return "cu_seq_lens_q and cu_seq_lens_k must be the same: tokens attend to themselves"
    for name, reason in (
        ("output_attentions", "no rank has all attention weights"),
        ("output_router_logits", "the load-balancing loss of a whole batch is not the sum of its parts'"),
    ):
        wanted = given.get(name)
        if getattr(config, name, False) if wanted is None else wanted:
            return f"{name} is not supported: {reason}"
    return None


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _shape(value: Any) -> str:
    """What was given instead, in a message."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _digest(tensor: Tensor | None) -> str | None:
    """What ranks compare instead of the values, with the shape."""
    if tensor is None:
        return None
    values = tensor.detach().cpu().long().contiguous().numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.sha256(values).hexdigest()[:12]}"


def _whole(positions: Tensor, group: ProcessGroup | None) -> Tensor:
    """`[b, s]` of every rank, of any integer dtype, to `[b, N]` int64."""
    positions = positions.long()
    if group is None or group.size() == 1:
        return positions
    parts = [torch.empty_like(positions) for _ in range(group.size())]
    dist.all_gather(parts, positions.contiguous(), group=group)
    return torch.cat(parts, dim=1)
