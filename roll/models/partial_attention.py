"""Attention to some of the keys, in a form that can be completed by attention to the others.

Beside the context it gives the log of the softmax's denominator, lse. Two results over different keys are one over both
after weighting each by its share of the denominator; and with the lse of all keys, the gradients of each part are exact
by themselves (Dao 2023, FlashAttention-2, section 3.1). Legend: Tq queries, Tk keys, h query heads, g kv heads, d head
size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from roll.models.attention import in_batches
from roll.models.segments import Segments

Context = tuple[Tensor, Tensor]
"""Context `[Tq, h, d]` and lse `[Tq, h]`, fp32 (fp64 if the queries are)."""

QUERIES_AT_ONCE = 256
"""Queries of a segment whose scores exist at the same time where no kernel does without them."""


def attend_partly(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Context:
    """q `[Tq, h, d]`, k and v `[Tk, g, d]` to the context over these keys alone. Autograd does not see it."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if _has_kernel(query):
        context, lse = torch.ops.aten._flash_attention_forward(
            query, key, value, *_bounds(segments), 0.0, segments.causal, False, scale=scale
        )[:2]
        return context.float(), lse.t()
    contexts, denominators = [], []
    for q, k, v in _batches(query, key, value, segments):
        parts = [
            (scores.softmax(-1) @ v.unsqueeze(2), scores.logsumexp(-1)) for _, scores in _scores(q, k, segments, scale)
        ]
        context, lse = (torch.cat(part, dim=3) for part in zip(*parts, strict=True))
        contexts.append(_tokens(context.flatten(1, 2)))
        denominators.append(_tokens(lse.flatten(1, 2)))
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
    # d softmax = p (dp - sum p dp), and sum p dp over all keys is the gradient times the context.
    by_row = torch.stack(((gradient.to(whole[1].dtype) * whole[0]).sum(-1), whole[1]), dim=-1)
    d_query, d_key, d_value = [], [], []
    by_query = zip(in_batches(gradient, segments, "query"), in_batches(by_row, segments, "query"), strict=True)
    for (q, k, v), of_query in zip(_batches(query, key, value, segments), by_query, strict=True):
        g, of_row = (x.unflatten(1, q.shape[1:3]) for x in of_query)
        products, lse = of_row.split(1, dim=-1)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, scores in _scores(q, k, segments, scale):
            probabilities = scores.sub_(lse[:, :, :, rows]).exp_()
            own = g[:, :, :, rows].to(v.dtype)
            dv += (probabilities.transpose(-1, -2) @ own).sum(2)
            d_products = own @ v.unsqueeze(2).transpose(-1, -2)
            d_scores = probabilities.mul_(d_products.sub_(products[:, :, :, rows])).mul_(scale)
            dq[:, :, :, rows] = d_scores @ k.unsqueeze(2)
            dk += (d_scores.transpose(-1, -2) @ q[:, :, :, rows]).sum(2)
        d_query.append(_tokens(dq.flatten(1, 2)))
        d_key.append(_tokens(dk))
        d_value.append(_tokens(dv))
    keys = segments.keys_in_order
    return torch.cat(d_query)[segments.queries_in_order], torch.cat(d_key)[keys], torch.cat(d_value)[keys]


def _has_kernel(query: Tensor) -> bool:
    """Whether torch's flash attention takes these; it is the one whose backward takes an lse from outside."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _bounds(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_starts, segments.key_starts, segments.longest_queries, segments.longest_keys


def _batches(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q `[segments, g, h/g, Lq, d]`, k and v `[segments, g, Lk, d]` of each kind of segment, in fp32 or fp64."""
    exact, groups = torch.promote_types(query.dtype, torch.float32), key.shape[1]
    queries = [q.unflatten(1, (groups, -1)).to(exact) for q in in_batches(query, segments, "query")]
    keys, values = ([x.to(exact) for x in in_batches(x, segments, "key")] for x in (key, value))
    return list(zip(queries, keys, values, strict=True))


def _scores(query: Tensor, key: Tensor, segments: Segments, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Some queries at a time, and their `[segments, g, h/g, queries, Lk]`, -inf where one does not see a key."""
    length, keys = query.shape[3], key.shape[2]
    places = torch.arange(keys, device=query.device)
    for start in range(0, length, QUERIES_AT_ONCE):
        rows = slice(start, start + QUERIES_AT_ONCE)
        scores = (query[:, :, :, rows] * scale) @ key.unsqueeze(2).transpose(-1, -2)
        if segments.causal:  # The last of the queries sees the last of the keys.
            scores.masked_fill_(places > places[keys - length :][rows].unsqueeze(1), -math.inf)
        yield rows, scores


def _tokens(x: Tensor) -> Tensor:
    """`[segments, heads, L, ...]` to `[segments * L, heads, ...]`."""
    return x.transpose(1, 2).flatten(0, 1)
