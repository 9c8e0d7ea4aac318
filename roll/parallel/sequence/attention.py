"""Attention over a sequence whose tokens are split over ranks.

Two ways, chosen by the number of heads. Where it divides by the ranks, heads are exchanged (DeepSpeed-Ulysses, Jacobs
et al. 2023): an all-to-all turns "all heads of my tokens" into "my heads of all tokens" and another one turns the
context back. Where it does not, every rank gathers the keys and values of all tokens and attends to them with its own
queries, all heads of them; the last rank has the most to do then.

Legend: b rows, N tokens of a whole row, n ranks, s = N/n, h query heads, g key-value heads, d head size.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.parallel.sequence.collectives import all_to_all, gather_for_own_use
from roll.parallel.sequence.kernels import AttentionOptions, Kernel
from roll.parallel.sequence.segments import Documents, Runs


def exchanges_heads(heads: int, ranks: int) -> bool:
    """Whether `ranks` ranks exchange heads, or else gather keys and values."""
    return heads % ranks == 0


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    kernel: Kernel,
    options: AttentionOptions,
    group: ProcessGroup | None,
) -> Tensor:
    """q `[b, s, h, d]`, k and v `[b, s, g, d]` of this rank's tokens, after RoPE, to their context `[b, s, h, d]`."""
    if group is None or group.size() == 1:
        return _on_flat_batch(q, k, v, documents.whole, kernel, options)
    if exchanges_heads(q.shape[2], group.size()):
        return _by_heads(q, k, v, documents, kernel, options, group)
    keys, values = gather_for_own_use(torch.stack((k, v)), 2, group)
    return _on_flat_batch(q, keys, values, documents.part(group.rank(), group.size()), kernel, options)


def copies_of_kv(kv_heads: int, ranks: int) -> int:
    """How often each kv head is needed so that the ranks get whole, equal shares of them; never more."""
    return ranks // gcd(kv_heads, ranks)


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    kernel: Kernel,
    options: AttentionOptions,
    group: ProcessGroup,
) -> Tensor:
    ranks = group.size()
    # Copies of a kv head stand next to each other, as the query heads that they serve do. Autograd adds up what they
    # get. h divides by g and by n, so by g * copies too, which is their least common multiple.
    copies = copies_of_kv(k.shape[2], ranks)
    k, v = k.repeat_interleave(copies, dim=2), v.repeat_interleave(copies, dim=2)
    shares = [x.unflatten(2, (ranks, -1)) for x in (q, k, v)]
    sizes = [share.shape[3] for share in shares]
    exchanged = all_to_all(torch.cat(shares, dim=3).flatten(2, 3), 2, 1, group, check=False)
    own_q, own_k, own_v = exchanged.split(sizes, dim=2)
    context = _on_flat_batch(own_q, own_k, own_v, documents.whole, kernel, options)
    return all_to_all(context, 1, 2, group, check=False)


def _on_flat_batch(q: Tensor, k: Tensor, v: Tensor, runs: Runs, kernel: Kernel, options: AttentionOptions) -> Tensor:
    """The kernel on `[b, tokens, heads, d]`."""
    return kernel(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), runs, options).view(q.shape)
