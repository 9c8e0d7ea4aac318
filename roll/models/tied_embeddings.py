"""Models whose output layer is their embedding (`tie_word_embeddings`).

The embedding is split on hidden and the output layer on the vocabulary, and they may stand on different pipeline
stages, so each has a copy of the weights. They start equal, and are given the same gradient: the sum of both.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp

from roll.families.tensors import EMBEDDING, OUTPUT
from roll.models.hf_mapping import mapped_parameters
from roll.parallel.state import ParallelState


def sum_tied_gradients(gpt: GPTModel, state: ParallelState) -> None:
    """Add the `main_grad` of the embedding and of the output layer, and give both the sum.

    Collective over the ranks that share the weights, and over the first and the last stage.
    """
    gradients = {
        name: mapped.parts("main_grad")[0]
        for mapped in mapped_parameters(gpt, state.mode)
        for name in mapped.hf_names
        if mapped.trained and name in (EMBEDDING, OUTPUT)
    }
    if not gradients:
        return  # A stage between the first and the last, or weights that are not trained.
    # In the output layer's layout, [V/n, H]; the embedding's is [V, H/n].
    parts = [all_to_all_hp2sp(gradients[EMBEDDING], group=state.weights)] if EMBEDDING in gradients else []
    parts += [gradients[OUTPUT]] if OUTPUT in gradients else []
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if state.pp.size() > 1:
        total = total.clone()
        dist.all_reduce(total, group=state.megatron.embd)
    if OUTPUT in gradients:
        gradients[OUTPUT].copy_(total)
    if EMBEDDING in gradients:
        gradients[EMBEDDING].copy_(all_to_all_sp2hp(total, group=state.weights))
