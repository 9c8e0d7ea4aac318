"""Log-probabilities and entropy of logits whose vocabulary is split over a tensor-parallel group.

No rank sees more than its own part of the vocabulary: the group exchanges three (with entropy, four) numbers per
token. Gradients flow through both results. Legend: N tokens, V vocabulary, tp ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, group: ProcessGroup, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits)[target] per token, and the entropy of the distribution if asked for.

    Args:
        logits: `[N, V/tp]`, this rank's part of the vocabulary (rank r holds ids `r*V/tp` to `(r+1)*V/tp - 1`);
            any float dtype, computed in fp32, not changed.
        targets: `[N]` int64 global token ids, equal on all ranks of `group`.

    Returns:
        log-probs `[N]` fp32 and entropy `[N]` fp32 in nats (or None).

    With m the largest logit, z = sum exp(l - m) and p the softmax: log p(t) = l_t - m - log z, and
    H = log z - sum p (l - m).
    """
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region as sum_over_vocab

    logits = logits.float()
    largest = logits.detach().amax(dim=-1)
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)
    exponentials = shifted.exp()

    local_targets = targets - group.rank() * logits.shape[-1]
    mine = (local_targets >= 0) & (local_targets < logits.shape[-1])
    picked = shifted.gather(-1, local_targets.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    picked = torch.where(mine, picked, 0.0)

    sums = [exponentials.sum(dim=-1), picked]
    if with_entropy:
        sums.append((exponentials * shifted).sum(dim=-1))
    total = sum_over_vocab(torch.stack(sums), group=group)
    log_z = total[0].log()
    entropy = log_z - total[2] / total[0] if with_entropy else None
    return total[1] - log_z, entropy
