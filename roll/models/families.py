"""What each family calls its tensors: a step apart from `hf_mapping`, between canonical names and a family's own.

Canonical are InternLM2's. The other families keep q, k and v apart, InternLM2 has them in one `wqkv`, whose rows are,
for each key-value head, its queries, then its key, then its value. Where the output is tied to the embedding, files
hold only the embedding: `to_family` leaves the output out, and readers take the embedding for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.config import ModelConfig
from roll.errors import UserError
from roll.models.hf_layout import hf_shapes

EMBEDDING, OUTPUT = "model.tok_embeddings.weight", "output.weight"
_LAYER = "model.layers.{n}."


@dataclass(frozen=True)
class TensorNames:
    """The tensors of one family.

    `rows` has, for each canonical name, the family's name, or its three names of q, k and v. `{n}` is a layer number.
    """

    rows: Mapping[str, tuple[str, ...]]

    def of(self, canonical: str) -> tuple[str, ...]:
        """The family's name of a tensor, or its three names of q, k and v."""
        pattern, number = _pattern(canonical)
        return tuple(name.format(n=number) for name in self.rows[pattern])

    def canonical(self, name: str) -> str | None:
        """The way back; None for a name that the family does not have."""
        pattern, number = _pattern(name)
        for canonical, names in self.rows.items():
            if pattern in names:
                return canonical.format(n=number)
        return None

    def is_computed(self, name: str) -> bool:
        """Whether the tensor follows from the config: old files hold the frequencies of RoPE, which are not read."""
        return name.endswith("rotary_emb.inv_freq")


def _pattern(name: str) -> tuple[str, str]:
    """`model.layers.12.x` as `model.layers.{n}.x` and `12`."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (_LAYER + name[layer.end() :], layer[1]) if layer else (name, "")


def _in_layers(names: Mapping[str, str | tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {
        _LAYER + canonical: tuple(_LAYER + name for name in ((own,) if isinstance(own, str) else own))
        for canonical, own in names.items()
    }


_LLAMA = {
    EMBEDDING: ("model.embed_tokens.weight",),
    **_in_layers(
        {
            "attention_norm.weight": "input_layernorm.weight",
            "attention.wqkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            "attention.wo.weight": "self_attn.o_proj.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "feed_forward.w1.weight": "mlp.gate_proj.weight",
            "feed_forward.w3.weight": "mlp.up_proj.weight",
            "feed_forward.w2.weight": "mlp.down_proj.weight",
        }
    ),
    "model.norm.weight": ("model.norm.weight",),
    OUTPUT: ("lm_head.weight",),
    "v_head.weight": ("v_head.weight",),  # Ours: none of these families has a value head.
}
_QKV_BIAS = _in_layers(
    {"attention.wqkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")}
)
_OUTPUT_BIAS = _in_layers({"attention.wo.bias": "self_attn.o_proj.bias"})
_QK_NORM = _in_layers(
    {"attention.q_norm.weight": "self_attn.q_norm.weight", "attention.k_norm.weight": "self_attn.k_norm.weight"}
)

TENSOR_NAMES: dict[str, TensorNames] = {
    "internlm2": TensorNames({canonical: (canonical,) for canonical in _LLAMA | _QKV_BIAS | _OUTPUT_BIAS}),
    "llama": TensorNames(_LLAMA | _QKV_BIAS | _OUTPUT_BIAS),
    "mistral": TensorNames(_LLAMA),
    "qwen2": TensorNames(_LLAMA | _QKV_BIAS),
    "qwen3": TensorNames(_LLAMA | _QKV_BIAS | _OUTPUT_BIAS | _QK_NORM),
}


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
    names = TENSOR_NAMES[model.model_type]
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
    names = TENSOR_NAMES[model.model_type]
    for name, tensor in tensors.items():
        canonical = names.canonical(name)
        if canonical is None:
            raise UserError(f"{name}: {model.model_type} has no such tensor")
        own = names.of(canonical)
        missing = [other for other in own if other not in tensors]
        if missing:
            raise UserError(f"{name} is joined with {' and '.join(missing)}, which must come with it")
        if name == own[0]:  # k and v come with their q.
            yield canonical, tensor if len(own) == 1 else join_qkv(model, *(tensors[other] for other in own))


def family_shapes(model: ModelConfig, head: str) -> dict[str, tuple[int, ...]]:
    """The family's name and the shape of every tensor of the whole model."""
    # Tensors without data, so that shapes take the same way as what they are compared with.
    canonical = ((name, torch.empty(shape, device="meta")) for name, shape in hf_shapes(model, head).items())
    return {name: tuple(tensor.shape) for name, tensor in to_family(model, canonical)}
