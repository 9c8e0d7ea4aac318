"""What stands after the last layer: a vocabulary projection that is applied in chunks, or a value per token.

Both take the place of `GPTModel.output_layer`, and both know only this rank's own tokens where a sequence is split from
the embedding on (mode isp, and cp): who wants those of all gathers results, not hidden states. Legend: b rows, s own
tokens of a row, n tensor-parallel ranks over which they are split between the linears (msp, fsp; else 1), V vocabulary,
H hidden.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from roll.config import Mode
from roll.parallel.sequence_gather import gather_sequence
from roll.parallel.state import ParallelState
from roll.parallel.vocab import vocab_parallel_log_probs


class HandOn(nn.Module):
    """The output layer that `GPTModel` calls: it hands the hidden states on, for `LanguageModelHead` to work on."""

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return input_, None


class LanguageModelHead(nn.Module):
    """The vocabulary projection, split over tp (mtp, msp, fsp) or whole (isp).

    The logits of all tokens at once would be the largest tensor of the step (T x V), so they are made chunk by chunk
    when something is computed from them, and again in the backward pass.
    """

    def __init__(self, vocab_size: int, config: TransformerConfig, state: ParallelState) -> None:
        super().__init__()
        self.mode: Mode = state.mode
        self.tp_group = state.tp
        shape = vocab_size // self.tp_group.size(), config.hidden_size
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

    def log_probs(
        self, hidden: Tensor, targets: Tensor, *, temperature: float, chunk: int, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(target) and entropy at `temperature`, both `[b, s]` fp32, equal on all tensor-parallel ranks.

        Args:
            hidden: `[b, s/n, H]`.
            targets: `[b, s]` int64.
            chunk: tokens whose logits exist at the same time.
        """
        shards = self._sequence_shards
        # Under sequence parallelism a chunk is the same part of every rank's shard.
        by_shard = targets.unflatten(1, (shards, -1))
        size = max(1, chunk // (hidden.shape[0] * shards))

        def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            if self.mode == "fsp":
                hidden = self._of_all_shards(hidden)
            logits = linear(hidden, self.weight).float().flatten(0, 1) / temperature
            results = vocab_parallel_log_probs(logits, targets.flatten(), self.tp_group, with_entropy=with_entropy)
            return tuple(x.view(targets.shape) for x in results if x is not None)

        parts = []
        for hidden_chunk, target_chunk in zip(hidden.split(size, dim=1), by_shard.split(size, dim=2), strict=True):
            # fsp keeps the shard and gathers it again when the chunk is computed again; the others gather once.
            inputs = hidden_chunk if self.mode == "fsp" else self._of_all_shards(hidden_chunk)
            parts.append(checkpoint(of_chunk, inputs, target_chunk, use_reentrant=False, preserve_rng_state=False))
        # Not views: an in-place change of those would cut FSDP2's hooks off.
        log_probs, *entropy = (torch.cat(part, dim=2).flatten(1).clone() for part in zip(*parts, strict=True))
        return log_probs, entropy[0] if with_entropy else None

    def logits(self, hidden: Tensor, *, parallel_output: bool = True) -> Tensor:
        """Logits at temperature 1: `[b, s, V/tp]`, `[b, s, V]` unless `parallel_output`; isp has no tp."""
        logits = linear(self._of_all_shards(hidden), self.weight)
        return logits if parallel_output else gather_from_tensor_model_parallel_region(logits, group=self.tp_group)

    @property
    def _sequence_shards(self) -> int:
        return self.tp_group.size() if self.mode in ("msp", "fsp") else 1

    def _of_all_shards(self, hidden: Tensor) -> Tensor:
        """`[b, s, H]`, with the sum over the vocabulary shards in backward that a column-parallel layer owes."""
        if self._sequence_shards == 1:
            return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return gather_sequence(hidden, self.tp_group, sums_gradients=True)


class ValueHead(nn.Module):
    """One value per token from its hidden state; starts at zero, whole on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig, state: ParallelState) -> None:
        super().__init__()
        self.tp_group = state.tp
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """`[s/n, b, H]` to values `[s, b, 1]` fp32."""
        values = linear(input_, self.weight).float()
        if self.sequence_parallel:
            values = gather_sequence(values.transpose(0, 1), self.tp_group).transpose(0, 1)
        return values, None
