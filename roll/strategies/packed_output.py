"""Answers of a split model, from what the last stage made of packed tokens.

`OwnOutput` answers about the tokens that this rank holds, `PackedOutput` about all tokens at their padded rows. Legend:
b rows, S padded length, T packed tokens, s tokens of a row that this rank holds, n tensor-parallel ranks over which
those are split between the linears (msp, fsp; else 1), V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from roll.config import StrategySettings
from roll.data.packing import PackedRows
from roll.data.sequence_split import HeldTokens
from roll.models.heads import LanguageModelHead
from roll.parallel.sequence_gather import gather_sequence
from roll.strategies.output import ModelOutput, check_head


@dataclass(frozen=True)
class OwnOutput:
    """Answers about the tokens that this rank holds."""

    tensor: Tensor
    """Output of the last stage: hidden states `[b, s/n, H]` for head `lm`, values `[b, s, 1]` for head `value`."""
    projection: LanguageModelHead | None
    """The vocabulary's head; None for head `value`, whose values the stage has computed."""
    settings: StrategySettings
    """Of the strategy: head, temperature, token_chunk and parallel_output."""
    cp: ProcessGroup
    """Ranks that hold the other tokens of the rows: those of context parallelism, or of sp in mode isp."""

    def log_probs(
        self, targets: Tensor, *, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(target) of each token, and the entropy if asked for; one pass over the vocabulary, chunk by chunk.

        Args:
            targets: `[b, s]` int64.

        Returns:
            `[b, s]` fp32 each.
        """
        return self._vocabulary().log_probs(
            self.tensor,
            targets,
            temperature=temperature,
            chunk=self.settings.token_chunk,
            with_entropy=with_entropy,
        )

    def logits(self) -> Tensor:
        """`[b, s, V/tp]` at temperature 1; `[b, s, V]` with `parallel.parallel_output` false."""
        return self._vocabulary().logits(self.tensor, parallel_output=self.settings.parallel.parallel_output)

    def values(self) -> Tensor:
        """`[b, s, 1]` fp32."""
        check_head(self.settings.head, "value")
        return self.tensor

    def _vocabulary(self) -> LanguageModelHead:
        """The vocabulary's head. Raises ValueError for a model with a value head."""
        check_head(self.settings.head, "lm")
        assert self.projection is not None
        return self.projection


class PackedOutput(ModelOutput):
    """Answers about all tokens of a packed micro-batch, at their rows.

    Under context parallelism (mode isp too) the ranks that share the batch exchange what they computed, so all compute
    the same loss. In backward each follows its own tokens, and the sum of the ranks' gradients is that of the loss.
    """

    def __init__(self, own: OwnOutput, rows: PackedRows, held: HeldTokens) -> None:
        """
        Args:
            own: answers about this rank's tokens.
            rows: how the micro-batch was packed.
            held: which tokens of the packed row this rank holds.
        """
        self.own = own
        self.rows = rows
        self.held = held
        self._log_probs: tuple[Tensor, Tensor] | None = None  # The ids that were asked about, and `[T]` for them.
        self._entropy: Tensor | None = None

    def log_probs(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self._log_probs is None or self._log_probs[0] is not input_ids:
            (log_probs,) = self._pass_over_vocabulary(input_ids, with_entropy=False)
            self._log_probs = input_ids, log_probs
        return self._at_rows(self._log_probs[1], attention_mask)

    def entropy(self, attention_mask: Tensor) -> Tensor:
        if self._entropy is None:
            # Entropy does not depend on which token was drawn, so any targets do.
            _, self._entropy = self._pass_over_vocabulary(torch.zeros_like(attention_mask), with_entropy=True)
        return self._at_rows(self._entropy, attention_mask)

    def log_probs_and_entropy(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        if self._entropy is None or self._log_probs is None or self._log_probs[0] is not input_ids:
            log_probs, self._entropy = self._pass_over_vocabulary(input_ids, with_entropy=True)
            self._log_probs = input_ids, log_probs
        return self._at_rows(self._log_probs[1], attention_mask), self._at_rows(self._entropy, attention_mask)

    def values(self, attention_mask: Tensor) -> Tensor:
        return self._at_rows(self._of_all_tokens(self.own.values()).squeeze(-1), attention_mask)

    def logits(self) -> Tensor:
        """Logits of this rank's tokens of the packed row at temperature 1, for losses that need more than log-probs.

        Under context parallelism (mode isp too) a rank has the logits of its own tokens, `held` says which. A loss over
        what a rank has is summed over the ranks by its gradients; as a metric it is reported as this rank's part.

        Returns:
            `[1, T/n, V/tp]` for n = cp or sp; `[1, T/n, V]` with `parallel.parallel_output` false.
        """
        return self.own.logits()

    def row_logits(self) -> Tensor:
        return self.rows.unpack(self._of_all_tokens(self.own.logits()))

    def _pass_over_vocabulary(self, input_ids: Tensor, *, with_entropy: bool) -> tuple[Tensor, ...]:
        """Log-probs of the tokens that follow each packed token, `[T]`, and if asked for their entropies, `[T]`."""
        targets = self.held.own(self.rows.next_tokens(input_ids)).unsqueeze(0)
        temperature = self.own.settings.temperature
        log_probs, entropy = self.own.log_probs(targets, temperature=temperature, with_entropy=with_entropy)
        results = [log_probs] if entropy is None else [log_probs, entropy]
        return self._of_all_tokens(torch.stack(results, dim=-1)).unbind(-1)  # One exchange for both.

    def _of_all_tokens(self, own: Tensor) -> Tensor:
        """`[1, T/n, ...]` of this rank's tokens to `[T, ...]` of all tokens of the packed row."""
        return self.held.in_order(gather_sequence(own, self.own.cp), dim=1)[0]

    def _at_rows(self, results: Tensor, attention_mask: Tensor) -> Tensor:
        """`[T]` results at their rows, `[b, S-1]`: zero where they are not wanted."""
        return torch.where(attention_mask[:, 1:].bool(), self.rows.unpack_next(results), 0.0)
