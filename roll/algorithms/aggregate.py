"""From per-token losses to the scalar that one micro-batch contributes: the only place where a loss is divided.

The denominator is counted once over the whole step (all data-parallel ranks, all micro-batches) and handed in as
`LossNormalizers`, so contributions and their gradients are plain sums: no mean of means, no factor for the number of
micro-batches or ranks.

Shapes: B rows, S padded length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from roll.algorithms.loss_term import STEP_METRICS, LossTerm, Normalizer, TokenLoss, check_normalizer
from roll.algorithms.masking import masked_mean, masked_sum
from roll.errors import UserError
from roll.protocol.field_names import UnknownName
from roll.protocol.normalizers import LossNormalizers

if TYPE_CHECKING:
    from roll.protocol import DataProto
    from roll.strategies.output import Loss, ModelOutput


def total_loss(terms: Sequence[LossTerm], data: DataProto, output: ModelOutput) -> Loss:
    """The weighted sum of terms, each divided by its own normaliser; a `LossFunc` once `terms` are bound.

    Metrics of the terms are parts of means over the tokens of the step, whatever divides the loss.

    Raises ValueError as `aggregate_loss` does, and if two terms give one name to their metrics, or a term gives
    one of its metrics a name of `STEP_METRICS`.
    """
    assert data.normalizers is not None
    mask = data["response_mask"][:, 1:]
    losses: list[Tensor] = []
    metrics: dict[str, Tensor] = {}
    for term in terms:
        per_token, diagnostics = _answer(term, data, output, mask)
        losses.append(term.weight * aggregate_loss(per_token, mask, data.normalizers, term.per))
        if twice := metrics.keys() & diagnostics.keys():
            raise UserError(f"two terms of a loss have a metric named {', '.join(sorted(twice))}")
        if taken := STEP_METRICS & diagnostics.keys():
            raise UserError(f"a term of a loss has a metric named {', '.join(sorted(taken))}, as the step itself has")
        metrics |= {name: aggregate_loss(value.detach(), mask, data.normalizers) for name, value in diagnostics.items()}
    return sum(losses[1:], start=losses[0]), metrics


def _answer(term: LossTerm, data: DataProto, output: ModelOutput, mask: Tensor) -> TokenLoss:
    """Loss and metrics of a term for a micro-batch. Raises ValueError, with the term's function, for anything else."""
    called = getattr(term.function, "func", term.function)
    what = f"loss term {getattr(called, '__qualname__', called)}"
    try:
        given = term.function(data, output)
    except UnknownName as error:
        raise UserError(f"{what} reads a field that its `reads` does not name: {error}") from error
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise UserError(f"{what} must give a loss per token and a dict of metrics, got a {type(given).__name__}")
    per_token, metrics = given
    for name, values in {"its loss": per_token, **metrics}.items():
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(f"{what}: {name} must be a tensor {list(mask.shape)}, a value per token; got {shape}")
    return per_token, dict(metrics)


def aggregate_loss(
    per_token_loss: Tensor, mask: Tensor, normalizers: LossNormalizers, mode: Normalizer = "token-mean"
) -> Tensor:
    """The part of the step's loss that these rows contribute: summed over micro-batches and ranks it is the loss.

    - `token-mean`: sum over tokens / tokens of the step.
    - `seq-mean-token-sum`: sum over tokens / sequences of the step.
    - `seq-mean-token-mean`: sum over rows of the row's token mean / sequences of the step. A row is never divided
      between micro-batches, so its own mean is known here.
    - a number: sum over tokens / that number.

    Sequences are the rows with at least one loss token. The same function sums up metrics, e.g. the step's mean ratio.

    Example: two micro-batches with losses [[1, 2]] and [[6, _]] (`_` masked) have tokens 3, sequences 2. They
    contribute 1 + 2 = 3 (token-mean), 1.5 + 3 = 4.5 (seq-mean-token-sum), 0.75 + 3 = 3.75 (seq-mean-token-mean).

    A micro-batch without loss tokens, and a step without any, give exactly 0 that can be backpropagated: the rank still
    takes part in every collective.

    Args:
        per_token_loss: [B, S-1] floating point; may hold anything where masked.
        mask: [B, S-1].
        normalizers: counts over the whole step.

    Returns:
        A scalar of the loss's dtype.

    Raises:
        ValueError: unknown mode, a number that is not above 0, unequal shapes, or loss tokens here although the step
            counts none.
    """
    check_normalizer(mode)
    if normalizers.tokens == 0 or normalizers.sequences == 0:
        if present := int((mask != 0).sum()):
            raise UserError(f"the micro-batch has {present} loss tokens, but its step is counted as {normalizers}")
        return masked_sum(per_token_loss, mask)
    if isinstance(mode, int | float):
        return masked_sum(per_token_loss, mask) / mode
    if mode == "token-mean":
        return masked_sum(per_token_loss, mask) / normalizers.tokens
    if mode == "seq-mean-token-sum":
        return masked_sum(per_token_loss, mask) / normalizers.sequences
    return masked_mean(per_token_loss, mask, dim=1).sum() / normalizers.sequences
