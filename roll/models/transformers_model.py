"""transformers' own model of each family, for generation and as an independent implementation to compare ours with.

A family that transformers lacks names another that is the same network there (`Family.in_transformers`): its Llama
stands in for InternLM2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roll.config import ModelConfig
from roll.errors import UserError
from roll.families.registry import stand_in
from roll.models.family_tensors import from_family, rename, to_family


def in_transformers(model: ModelConfig) -> ModelConfig:
    """The same network, as a family that transformers has."""
    other = stand_in(model.family)
    return model if other is None else model.model_copy(update={"model_type": other})


def build_transformers_model(model: ModelConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with unset weights; fill it with `load_tensors`."""
    # Without `pad_token_id`: torch gives the embedding of that id no gradient, and it may be that of a real token.
    config = AutoConfig.for_model(**(in_transformers(model).to_hf_dict() | {"pad_token_id": None}))
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def load_tensors(target: PreTrainedModel, model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy tensors under the family's names into transformers' model; returns the names there that were filled.

    Raises:
        ValueError: a tensor has no place or another shape than the model.
    """
    parameters = dict(target.named_parameters())
    filled = set()
    for name, tensor in as_transformers_names(model, tensors):
        if name not in parameters or parameters[name].shape != tensor.shape:
            wanted = tuple(parameters[name].shape) if name in parameters else "no such tensor"
            raise UserError(f"{name}: got shape {tuple(tensor.shape)}, the model has {wanted}")
        with torch.no_grad():
            parameters[name].copy_(tensor)
        filled.add(name)
    return filled


def as_transformers_names(model: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the family's names, as transformers' model calls them."""
    return rename(model, in_transformers(model), tensors)


def as_family_names(model: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The way back, for all tensors at once."""
    if model.family.in_transformers is None:
        return iter(tensors.items())
    return to_family(model, canonical_tensors(model, tensors))


def canonical_tensors(model: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of transformers' model (or their gradients) under canonical names."""
    return from_family(in_transformers(model), tensors)


def forget_lengths(network: PreTrainedModel) -> None:
    """Let the next batch choose dynamic RoPE's base afresh: the model keeps the one of the longest row it has seen."""
    rotary = network.model.rotary_emb
    network.model.rotary_emb = type(rotary)(network.config).to(network.device)
