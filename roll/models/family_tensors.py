"""Tensors under a family's names, which its files have, and under canonical names (`roll.families.tensors`).

A step apart from `hf_mapping`. Where the output is tied to the embedding, files hold only the embedding: `to_family`
leaves the output out, and readers take the embedding for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from roll.config import ModelConfig
from roll.errors import UserError
from roll.families.tensors import OUTPUT
from roll.models.hf_layout import hf_shapes


def split_qkv(model: ModelConfig, wqkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q `[h*d, ...]`, k and v `[g*d, ...]` of a wqkv weight `[(h + 2g)*d, H]` or bias `[(h + 2g)*d]`."""
    groups = wqkv.unflatten(0, (model.num_key_value_heads, -1, model.head_dim))
    return groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)


def join_qkv(model: ModelConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The way back, for whole tensors or for parts that hold some of the key-value heads and their queries."""
    groups = [x.unflatten(0, (len(k) // model.head_dim, -1, model.head_dim)) for x in (q, k, v)]
    return torch.cat(groups, dim=1).flatten(0, 2)


def to_family(model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, whole tensor) pairs as the family's, one at a time."""
    names = model.family.names
    for canonical, tensor in tensors:
        if canonical == OUTPUT and model.tie_word_embeddings:
            continue
        own = names.of(canonical)
        yield from zip(own, (tensor,) if len(own) == 1 else split_qkv(model, tensor), strict=True)


def from_family(model: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The way back, for tensors or for their gradients.

    Raises:
        ValueError: the family has no such tensor, or one of q, k and v is missing; names it.
    """
    names = model.family.names
    for name, tensor in tensors.items():
        canonical = names.canonical(name)
        if canonical is None:
            raise UserError(f"{name}: {model.family.model_type} has no such tensor")
        own = names.of(canonical)
        missing = [other for other in own if other not in tensors]
        if missing:
            raise UserError(f"{name} is joined with {' and '.join(missing)}, which must come with it")
        if name == own[0]:  # k and v come with their q.
            yield canonical, tensor if len(own) == 1 else join_qkv(model, *(tensors[other] for other in own))


def rename(
    model: ModelConfig, other: ModelConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names of `model`'s family as those of `other`'s, one at a time: q may come without k and v.

    A name that the family does not have stays as it is. `other` has q, k and v apart.
    """
    names, others = model.family.names, other.family.names
    for name, tensor in tensors:
        canonical = names.canonical(name)
        if canonical is None:
            yield name, tensor
            continue
        own, theirs = names.of(canonical), others.of(canonical)
        if len(own) == len(theirs):
            yield theirs[own.index(name)], tensor
        else:
            yield from zip(theirs, split_qkv(model, tensor), strict=True)


def family_shapes(model: ModelConfig, head: str) -> dict[str, tuple[int, ...]]:
    """The family's name and the shape of every tensor of the whole model."""
    # Tensors without data, so that shapes take the same way as what they are compared with.
    canonical = ((name, torch.empty(shape, device="meta")) for name, shape in hf_shapes(model, head).items())
    return {name: tuple(tensor.shape) for name, tensor in to_family(model, canonical)}
