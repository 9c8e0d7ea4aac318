"""A dispatched model on several ranks beside the same model on one process: logits, losses and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from roll.parallel.sequence import (
    Reducer,
    dispatched_modules,
    get_sequence_parallel_group,
    reduce_sequence_parallel_loss,
    shift_labels,
    split_for_sequence_parallel,
    split_tensor,
)
from tests.parallel.sequence.tiny_models import VOCABULARY

LENGTH = 32
# Documents of two packed rows; they cross the edges of parts of 8 and of 16 tokens.
PACKED = ((5, 14, 13), (3, 3, 26))
# Real tokens of two padded rows: with parts of 8, one rank has none, the last or on the left the first.
REAL = (21, 7)


Reference = tuple[Tensor, Tensor, dict[str, Tensor]]
# The ways to a loss: labels shifted before the split; the model's own `labels`; these without the reduction after it.
How = Literal["shifted", "labels", "unreduced"]


@dataclass
class Batch:
    """What one process would be given, whole."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None


def make_batch(inputs: str, labelled: str, seed: int = 0) -> Batch:
    """`inputs`: dense, padded, left_padded, packed or cu_seqlens.

    `labelled`: uneven, all (of packed rows also the first of each document), one_rank, border (predicted by another
    rank than the one that has it, on 2 and on 4 ranks), first (predicted by nothing) or none. Labels are not shifted.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    if labelled == "uneven":
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        labels[0, :11] = -100  # a prompt
    elif labelled == "one_rank":
        labels[:, :3] = -100
        labels[:, 7:] = -100
    elif labelled in ("border", "first"):
        kept = LENGTH // 2 if labelled == "border" else 0
        labels[:, torch.arange(LENGTH) != kept] = -100
    elif labelled != "all":
        assert labelled == "none"
        labels[:] = -100
    batch = Batch(tokens, labels)
    if inputs in ("padded", "left_padded"):
        mask = (torch.arange(LENGTH) < torch.tensor(REAL).unsqueeze(1)).long()
        batch.attention_mask = mask if inputs == "padded" else mask.flip(1)
        begins = batch.attention_mask.cumsum(1) <= 1  # what comes before the first real token predicts nothing
        batch.labels = labels.masked_fill((batch.attention_mask == 0) | begins, -100)
    elif inputs in ("packed", "cu_seqlens"):
        rows = [torch.cat([torch.arange(count) for count in row]) for row in PACKED]
        batch.position_ids = torch.stack(rows)
        if labelled != "all":
            batch.labels = labels.masked_fill(batch.position_ids == 0, -100)  # no document predicts the next one
        if inputs == "cu_seqlens":
            flat = torch.tensor([count for row in PACKED for count in row])
            batch.cu_seqlens = F.pad(flat.cumsum(0), (1, 0)).int()
    else:
        assert inputs == "dense"
    return batch


def token_loss(logits: Tensor, shifted: Tensor) -> Tensor:
    """The mean over this part's tokens in the dtype of the logits; transformers' own loss is in fp32."""
    total = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum")
    return total / (shifted != -100).sum()


def reference(model: Any, batch: Batch) -> Reference:
    """Logits, loss (zero without labels) and gradients of one process; transformers shifts the labels itself."""
    model.zero_grad()
    output = model(
        input_ids=batch.tokens, attention_mask=batch.attention_mask, position_ids=batch.position_ids, use_cache=False
    )
    if not (batch.labels[:, 1:] != -100).any():
        zeros = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
        return output.logits.detach(), output.logits.new_zeros(()), zeros
    if output.logits.dtype == torch.float64:
        loss = token_loss(output.logits[:, :-1], batch.labels[:, 1:])
    else:
        loss = model.loss_function(logits=output.logits, labels=batch.labels, vocab_size=VOCABULARY)
    loss.backward()
    return output.logits.detach(), loss.detach(), gradients(model)


def all_references(model: Any, batches: dict[str, Batch]) -> dict[str, Reference]:
    """Of every batch, each computed by one rank: the ranks share two cores."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = {name: reference(model, batch) for name, batch in list(batches.items())[rank::ranks]}
    everyone: list[dict[str, Reference]] = [{}] * ranks
    dist.all_gather_object(everyone, own)
    return {name: found for each in everyone for name, found in each.items()}


def gradients(model: Any) -> dict[str, Tensor]:
    """All of them, zero where there is none."""
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
    }


def exact_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | None = None,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss without its rounding to fp32."""
    assert shift_labels is not None and num_items_in_batch is not None
    total = F.cross_entropy(logits.view(-1, vocab_size), shift_labels.flatten(), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def split_run(
    model: Any, batch: Batch, reducer: Reducer = "mean", how: How = "shifted", **others: Any
) -> tuple[Tensor, Tensor]:
    """Forward and backward of this rank's part with a dispatched model: logits of the part and the reduced loss."""
    labels = shift_labels(batch.labels, batch.cu_seqlens) if how == "shifted" else batch.labels
    tokens, labels, positions = split_for_sequence_parallel(batch.tokens, labels, batch.position_ids)
    packed = {} if batch.cu_seqlens is None else {"cu_seq_lens_q": batch.cu_seqlens}
    output = model(
        input_ids=tokens,
        attention_mask=batch.attention_mask,
        position_ids=positions,
        **{"shift_labels" if how == "shifted" else "labels": labels},
        **packed,
        **others,
    )
    loss = output.loss
    if how != "unreduced":
        loss = reduce_sequence_parallel_loss(loss, (labels != -100).sum(), reducer=reducer)
    loss.backward()
    return output.logits.detach(), loss.detach()


def reduced(found: dict[str, Tensor], reducer: Reducer, group: Any = None) -> dict[str, Tensor]:
    """Gradients combined over the ranks as a trainer would."""
    flat = torch.cat([gradient.flatten() for gradient in found.values()])
    dist.all_reduce(flat, group=group)
    if reducer == "mean":
        flat /= dist.get_world_size(group)
    parts = flat.split([gradient.numel() for gradient in found.values()])
    return {name: part.view_as(found[name]) for name, part in zip(found, parts, strict=True)}


def differences(
    model: Any,
    batches: dict[str, Batch],
    *,
    logits: float,
    gradient: float,
    reducer: Reducer = "mean",
    hows: Sequence[How] = ("shifted",),
) -> dict[str, list[str]]:
    """Which batches this rank finds further from one process than the tolerances, and where; the groups exist already.

    Logits count where tokens are real. A gradient's error is relative to the largest of the same weight, or to a
    thousandth of the largest of all where a weight has none (a key's bias, which softmax does not see).
    """
    group = get_sequence_parallel_group()
    references = all_references(model, batches)
    failed = {}
    with dispatched_modules(model):
        for (name, batch), how in product(batches.items(), hows):
            model.zero_grad()
            found_logits, found_loss = split_run(model, batch, reducer, how)
            found = reduced(gradients(model), reducer, group)
            expected_logits, expected_loss, expected = references[name]
            wrong = []
            scale = max(1.0, float(expected_logits.abs().max()))
            error = (found_logits - split_tensor(expected_logits, group=group)).abs()
            if batch.attention_mask is not None:
                error = error * split_tensor(batch.attention_mask, group=group).unsqueeze(-1)
            if not error.max() <= logits * scale:
                wrong.append(f"logits {error.max() / scale:.1e}")
            if not abs(found_loss - expected_loss) <= logits * max(1.0, float(expected_loss)):
                wrong.append(f"loss {float(found_loss):.8f} instead of {float(expected_loss):.8f}")
            largest = max(float(value.abs().max()) for value in expected.values())
            for weight, value in expected.items():
                error = (found[weight] - value).abs().max()
                unit = max(float(value.abs().max()), 1e-3 * largest)
                if not error <= gradient * unit:
                    wrong.append(f"gradient of {weight}: {float(error):.1e} of {unit:.1e}")
            if wrong:
                failed[f"{name}-{how}"] = wrong
    return failed
