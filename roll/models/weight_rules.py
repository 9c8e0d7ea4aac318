"""The table of Megatron-Core's parameters: the tensors each is made of, how it is split, and whether it is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from roll.config import Mode
from roll.families.tensors import EMBEDDING, LAYER, OUTPUT, QK_NORMS, VALUE_HEAD, WO_BIAS, WQKV, WQKV_BIAS
from roll.parallel import SplitOver


@dataclass(frozen=True)
class Split:
    """Split of a weight: each rank of a group has an equal part of dimension `dim` of the whole tensor."""

    over: SplitOver
    dim: int


@dataclass(frozen=True, kw_only=True)
class WeightRule:
    """One Megatron-Core parameter and the canonical tensors it is made of.

    `{n}` stands for the layer's number in the whole model. Several names are shards of several tensors, one after the
    other: Megatron-Core's `linear_fc1` of a rank is its part of w1 above its part of w3.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split | None
    """Split in modes mtp, msp and fsp; None where every rank has the whole."""
    isp_split: Split
    """Split in mode isp."""
    trained: bool = True
    """Whether training changes it. A weight that is not trained has no gradient, and no optimizer holds it."""

    def split_in(self, mode: Mode) -> Split | None:
        """Split in `mode`."""
        return self.isp_split if mode == "isp" else self.split


_DECODER_LAYER = "decoder.layers.{n}."
_TP_ROWS, _TP_COLUMNS, _WP_ROWS, _WP_COLUMNS = Split("tp", 0), Split("tp", 1), Split("wp", 0), Split("wp", 1)
_W1, _W3 = LAYER + "feed_forward.w1.weight", LAYER + "feed_forward.w3.weight"


def _of_layer(megatron: str, *hf: str, split: Split | None) -> WeightRule:
    return WeightRule(megatron=_DECODER_LAYER + megatron, hf=hf, split=split, isp_split=_WP_ROWS)


RULES: Mapping[str, WeightRule] = {
    rule.megatron: rule
    for rule in (
        WeightRule(megatron="embedding.weight", hf=(EMBEDDING,), split=_TP_COLUMNS, isp_split=_WP_COLUMNS),
        _of_layer("input_layernorm.weight", LAYER + "attention_norm.weight", split=None),
        _of_layer("self_attention.linear_qkv.weight", WQKV, split=_TP_ROWS),
        _of_layer("self_attention.linear_qkv.bias", WQKV_BIAS, split=_TP_ROWS),
        _of_layer("self_attention.q_layernorm.weight", QK_NORMS[0], split=None),
        _of_layer("self_attention.k_layernorm.weight", QK_NORMS[1], split=None),
        _of_layer("self_attention.linear_proj.weight", LAYER + "attention.wo.weight", split=_TP_COLUMNS),
        # Whole on every tensor-parallel rank, which adds it once, after the sum over the ranks.
        _of_layer("self_attention.linear_proj.bias", WO_BIAS, split=None),
        _of_layer("pre_mlp_layernorm.weight", LAYER + "ffn_norm.weight", split=None),
        _of_layer("mlp.linear_fc1.weight", _W1, _W3, split=_TP_ROWS),
        # Mode isp has the two apart (`GateAndUpLinear`).
        _of_layer("mlp.linear_fc1.w1", _W1, split=_TP_ROWS),
        _of_layer("mlp.linear_fc1.w3", _W3, split=_TP_ROWS),
        _of_layer("mlp.linear_fc2.weight", LAYER + "feed_forward.w2.weight", split=_TP_COLUMNS),
        WeightRule(
            megatron="decoder.final_layernorm.weight", hf=("model.norm.weight",), split=None, isp_split=_WP_ROWS
        ),
        WeightRule(megatron="head.weight", hf=(OUTPUT,), split=_TP_ROWS, isp_split=_WP_ROWS),
        WeightRule(megatron="output_layer.weight", hf=(VALUE_HEAD,), split=None, isp_split=_WP_COLUMNS),
    )
}
"""By the parameter's name in Megatron-Core."""


def is_trained(canonical: str) -> bool:
    """Whether training changes a tensor, given by its canonical name."""
    pattern = re.sub(r"^model\.layers\.\d+\.", LAYER, canonical)
    rules = [rule for rule in RULES.values() if pattern in rule.hf]
    assert rules, canonical
    return all(rule.trained for rule in rules)
