"""What stands after the last layer: a vocabulary projection that is applied in chunks, or a value per token.

Both take the place of `GPTModel.output_layer`. Legend: T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from roll.parallel.vocab import vocab_parallel_log_probs


class LanguageModelHead(ColumnParallelLinear):
    """The vocabulary projection, split over tp. As a layer it hands the hidden states on as they are.

    The logits of all tokens at once would be the largest tensor of the step (T x V), so they are made chunk by chunk
    when something is computed from them, and again in the backward pass.
    """

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return input_, None

    def log_probs(
        self, hidden: Tensor, targets: Tensor, *, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """log p(target) and entropy at `temperature`, both `[T]` fp32, equal on all tensor-parallel ranks.

        Args:
            hidden: `[1, T, H]` (this rank's `T/tp` tokens under sequence parallelism).
            targets: `[T]` int64.
            chunk: tokens whose logits exist at the same time.
        """

        def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            logits = linear(hidden, self.weight).float() / temperature
            return vocab_parallel_log_probs(logits, targets, self.tp_group, with_entropy=with_entropy)

        parts = [
            checkpoint(of_chunk, hidden_chunk, target_chunk, use_reentrant=False, preserve_rng_state=False)
            for hidden_chunk, target_chunk in zip(
                self._for_all_tokens(hidden).split(chunk), targets.split(chunk), strict=True
            )
        ]
        log_probs = torch.cat([part[0] for part in parts])
        return log_probs, torch.cat([part[1] for part in parts]) if with_entropy else None

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the logits, `[T, V/tp]`, at temperature 1."""
        return linear(self._for_all_tokens(hidden), self.weight)

    def _for_all_tokens(self, hidden: Tensor) -> Tensor:
        """`[T, H]`, with the sum over the vocabulary shards in backward that a column-parallel layer owes its input."""
        if self.sequence_parallel:
            full = gather_from_sequence_parallel_region(
                hidden.transpose(0, 1), tensor_parallel_output_grad=True, group=self.tp_group
            )
            return full.squeeze(1)
        return copy_to_tensor_model_parallel_region(hidden.squeeze(0), group=self.tp_group)


class ValueHead(nn.Module):
    """One value per token from its hidden state; starts at zero, whole on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, tp_group: ProcessGroup) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # see RMSNorm

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """`[T, 1, H]` (`[T/tp, 1, H]` under sequence parallelism) to values `[T, 1, 1]` fp32 of all tokens."""
        values = linear(input_, self.weight).float()
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None
