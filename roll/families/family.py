"""Declaration of a family of models: its config.json, its tensors, and where its network differs from the others'.

All families are one network: a decoder with RMSNorm before attention and MLP, grouped-query attention, RoPE and SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from roll.errors import UserError
from roll.families.tensors import QK_NORMS, WO_BIAS, WQKV_BIAS, Names, TensorNames

RopeType = Literal["linear", "dynamic", "llama3"]

DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
"""Defaults that the families here have in common."""

# Non-square everywhere, so that a missing transpose cannot hide; numbers large, so that gradients are far from zero.
TINY: Mapping[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
"""A model that every mode of the tests can split."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: what its config.json says, what its tensors are called, and which parts its network has.

    A family of your own is an object of this class; one that resembles another begins as `dataclasses.replace` of it.

    Raises:
        UserError: the declaration contradicts itself; all contradictions are listed.
    """

    model_type: str
    """`model_type` of config.json."""
    architecture: str
    """Name of the network under `architectures` of config.json, ending in ForCausalLM."""
    defaults: Mapping[str, Any]
    """Values of keys that config.json leaves out, under the keys of config.json."""
    only: Mapping[str, Any]
    """Keys that change what the model computes, with the only value that is supported here."""
    tensors: Names
    """Canonical names (`roll.families.tensors`) to the names in the files."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Keys of config.json for fields of `ModelConfig` that have another name there; None: the family has no such key.
    `bias` speaks of q, k, v and the attention's output; a family without a key for it has no bias there."""
    qkv_bias: bool = False
    """Whether q, k and v have biases whatever the config says. No family has biases outside attention."""
    qk_norm: bool = False
    """Whether each query and key head goes through an RMSNorm before RoPE."""
    free_head_dim: bool = True
    """Whether `head_dim` may differ from hidden_size / num_attention_heads."""
    rope_types: tuple[RopeType, ...] = ("linear", "dynamic", "llama3")
    """Values of rope_scaling's type that its own code knows and this library has, beside `default`."""
    rope_scaling_keys: Mapping[str, str] | None = None
    """Keys that its own code accepts inside of rope_scaling, as field of `RopeScaling` to key; None: all fields."""
    base_prefix: str = "model."
    """Beginning of tensor names that files of the network without its output layer leave out."""
    computed: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of names of tensors that follow from the config: old files hold them, and they are not read."""
    in_transformers: str | None = None
    """Name of the family that transformers has the same network under; None: transformers has this one."""
    tiny: Mapping[str, Any] = field(default_factory=lambda: TINY)
    """Fields of `ModelConfig` for a small model, which tests compare with one process under every mode."""

    def __post_init__(self) -> None:
        mistakes = [*self.names.mistakes(), *self._missing_names()]
        if mistakes:
            raise UserError(f"family {self.model_type!r}: " + "; ".join(mistakes))

    @cached_property
    def names(self) -> TensorNames:
        """The names of its tensors, in both directions."""
        return TensorNames(self.tensors)

    @property
    def base_architecture(self) -> str:
        """The name of the network without an output layer."""
        return self.architecture.removesuffix("ForCausalLM") + "Model"

    def key(self, name: str) -> str | None:
        """The key of config.json for a field of `ModelConfig`; None if the family has none."""
        return self.keys.get(name, name)

    def is_computed(self, name: str) -> bool:
        """Whether a tensor follows from the config."""
        return name.endswith(self.computed)

    def _missing_names(self) -> Iterator[str]:
        has_key = self.key("bias") is not None
        for asked, flag, names in (
            (self.qkv_bias or has_key, "qkv_bias or a key for bias", (WQKV_BIAS,)),
            (has_key, "a key for bias", (WO_BIAS,)),
            (self.qk_norm, "qk_norm", QK_NORMS),
        ):
            for name in names:
                if asked and name not in self.tensors:
                    yield f"tensors lack {name!r}, which {flag} asks for"
                if not asked and name in self.tensors:
                    yield f"tensors have {name!r}, which belongs to {flag}"
