"""The token embedding, split on its hidden dimension: `[V, H/tp]` on each rank (Embedding1D of InternEvo).

Legend: b rows, s tokens of a row on this rank, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import embedding

from roll.data.packing import check_divides


class HiddenParallelEmbedding(nn.Module):
    """Takes the place of `GPTModel.embedding`.

    Every rank looks up its part of the hidden dimension for all tokens. In mtp the parts are gathered. Under sequence
    parallelism a rank needs the whole hidden dimension of its own tokens only, which is one all-to-all: a 1/tp of what
    gathering everything and throwing most of it away would move.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        # Megatron-Core 0.19 asks whether it has to scatter the tokens itself (gpt_model.py:346).
        self.scatter_to_sequence_parallel = True
        self.tp_group = tp_group
        width = config.hidden_size // tp_group.size()
        self.weight = nn.Parameter(torch.empty(vocab_size, width, dtype=config.params_dtype))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Token ids `[b, s]` to `[s, b, H]`, `[s/tp, b, H]` under sequence parallelism. Positions are not used.

        Raises:
            ValueError: s does not split over tp.
        """
        if self.sequence_parallel:
            check_divides(input_ids.shape[1], self.tp_group.size())
        part = embedding(input_ids.transpose(0, 1), self.weight)
        if self.tp_group.size() == 1:
            return part
        if self.sequence_parallel:
            # Tokens are ordered by position first, so a rank's share of them is its part of the sequence.
            own_tokens = all_to_all_hp2sp(part, group=self.tp_group)
            return own_tokens.view(-1, input_ids.shape[0], own_tokens.shape[-1])
        return gather_from_tensor_model_parallel_region(part, group=self.tp_group)
