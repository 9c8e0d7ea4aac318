"""Attention to some of the keys, in a form that can be completed by attention to the others.

Beside the context it gives the log of the softmax's denominator, lse. Two results over different keys are one over both
after weighting each by its share of the denominator; and with the lse of all keys, the gradients of each part are exact
by themselves (Dao 2023, FlashAttention-2, section 3.1). Legend: Tq queries, Tk keys, h query heads, g kv heads, d head
size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from roll.models.attention import causal_mask, in_batches
from roll.models.segments import Segments

Context = tuple[Tensor, Tensor]
"""Context `[Tq, h, d]` and lse `[Tq, h]`, fp32 (fp64 if the queries are)."""


def attend_partly(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Context:
    """q `[Tq, h, d]`, k and v `[Tk, g, d]` to the context over these keys alone. Autograd does not see it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if _has_kernel(query):
        context, lse = torch.ops.aten._flash_attention_forward(
            query, key, value, *_bounds(segments), 0.0, segments.causal, False, scale=scale
        )[:2]
        return context.float(), lse.t()
    exact = torch.promote_types(query.dtype, torch.float32)
    contexts, denominators = [], []
    for q, k, v in _batches(query, key, value, segments):
        scores = _scores(q.to(exact), k.to(exact), segments, scale)
        context = scores.softmax(-1) @ v.to(exact).unsqueeze(2)
        contexts.append(_tokens(context.flatten(1, 2)))
        denominators.append(_tokens(scores.logsumexp(-1).flatten(1, 2)))
    order = segments.queries_in_order
    return torch.cat(contexts)[order], torch.cat(denominators)[order]


def merge(one: Context, other: Context) -> Context:
    """Over the keys of both, which have none in common."""
    lse = torch.logaddexp(one[1], other[1])
    parts = [context * (part - lse).exp().unsqueeze(-1) for context, part in (one, other)]
    return parts[0] + parts[1], lse


def partial_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    whole: Context,
    segments: Segments,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients of q, and the gradients of k and v from these queries.

    Args:
        gradient: of the whole context, `[Tq, h, d]`.
        whole: the context and lse of these queries over all keys.

    Returns:
        Those of q `[Tq, h, d]`, k and v `[Tk, g, d]`, fp32 (fp64 if the queries are).
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if _has_kernel(query):
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # Of the dropout that there is none of.
        context, lse = whole[0].to(query.dtype), whole[1].t().contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, context, lse, *_bounds(segments), 0.0, segments.causal, state, state,
            scale=scale,
        )  # fmt: skip
        return gradients[0].float(), gradients[1].float(), gradients[2].float()
    exact = torch.promote_types(query.dtype, torch.float32)
    # d softmax = p (dp - sum p dp), and sum p dp over all keys is the gradient times the context.
    rows = (gradient.to(exact) * whole[0]).sum(-1, keepdim=True)
    columns = torch.cat((gradient.to(exact), rows, whole[1].unsqueeze(-1)), dim=-1)
    d_query, d_key, d_value = [], [], []
    by_query = in_batches(columns, segments, "query")
    for (q, k, v), of_query in zip(_batches(query, key, value, segments), by_query, strict=True):
        q, k, v = q.to(exact), k.to(exact), v.to(exact).unsqueeze(2)
        g, row, lse = of_query.unflatten(1, (q.shape[1], -1)).split([v.shape[-1], 1, 1], dim=-1)
        probabilities = (_scores(q, k, segments, scale) - lse).exp_()
        d_value.append(_tokens((probabilities.transpose(-1, -2) @ g).sum(2)))
        d_scores = probabilities.mul_(g @ v.transpose(-1, -2) - row).mul_(scale)
        d_query.append(_tokens((d_scores @ k.unsqueeze(2)).flatten(1, 2)))
        d_key.append(_tokens((d_scores.transpose(-1, -2) @ q).sum(2)))
    keys = segments.keys_in_order
    return torch.cat(d_query)[segments.queries_in_order], torch.cat(d_key)[keys], torch.cat(d_value)[keys]


def _has_kernel(query: Tensor) -> bool:
    """Whether torch's flash attention takes these; it is the one whose backward takes an lse from outside."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _bounds(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_starts, segments.key_starts, segments.longest_queries, segments.longest_keys


def _batches(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q `[segments, g, h/g, Lq, d]`, k and v `[segments, g, Lk, d]` of each kind of segment."""
    groups = key.shape[1]
    queries = [q.unflatten(1, (groups, -1)) for q in in_batches(query, segments, "query")]
    keys, values = in_batches(key, segments, "key"), in_batches(value, segments, "key")
    return list(zip(queries, keys, values, strict=True))


def _scores(query: Tensor, key: Tensor, segments: Segments, scale: float) -> Tensor:
    """`[segments, g, h/g, Lq, Lk]`, -inf where a query does not see a key."""
    scores = (query * scale) @ key.unsqueeze(2).transpose(-1, -2)
    if segments.causal:
        scores.masked_fill_(~causal_mask(scores.shape[-2], scores.shape[-1], scores.device), -math.inf)
    return scores


def _tokens(x: Tensor) -> Tensor:
    """`[segments, heads, L, ...]` to `[segments * L, heads, ...]`."""
    return x.transpose(1, 2).flatten(0, 1)
