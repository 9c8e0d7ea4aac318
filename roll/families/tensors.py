"""Canonical names of tensors, which are InternLM2's, and the table from them to the names of a family.

`{n}` stands for a layer's number. Canonical `wqkv` has q, k and v in one tensor, whose rows are, for each key-value
head, its queries, then its key, then its value. A family has that tensor too, or q, k and v apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

EMBEDDING, OUTPUT, VALUE_HEAD = "model.tok_embeddings.weight", "output.weight", "v_head.weight"
LAYER = "model.layers.{n}."
WQKV, WQKV_BIAS = LAYER + "attention.wqkv.weight", LAYER + "attention.wqkv.bias"
WO_BIAS = LAYER + "attention.wo.bias"
QK_NORMS = LAYER + "attention.q_norm.weight", LAYER + "attention.k_norm.weight"
EVERYWHERE = (
    EMBEDDING,
    LAYER + "attention_norm.weight",
    WQKV,
    LAYER + "attention.wo.weight",
    LAYER + "ffn_norm.weight",
    LAYER + "feed_forward.w1.weight",
    LAYER + "feed_forward.w3.weight",
    LAYER + "feed_forward.w2.weight",
    "model.norm.weight",
    OUTPUT,
)
"""Tensors that every family has. Where the output is tied to the embedding, files may hold the embedding alone."""
CANONICAL = (*EVERYWHERE, WQKV_BIAS, WO_BIAS, *QK_NORMS)
"""Tensors that a family may have, but for the value head, which is ours and called the same everywhere."""

Names = Mapping[str, str | tuple[str, str, str]]
"""Canonical name to the family's name, or to its three names of q, k and v."""


def in_layers(layer: str, names: Names) -> dict[str, str | tuple[str, str, str]]:
    """The table of a layer's tensors, from names that leave the layer out.

    >>> in_layers("h.{n}.", {"ffn_norm.weight": "norm.weight"})
    {'model.layers.{n}.ffn_norm.weight': 'h.{n}.norm.weight'}
    """
    table: dict[str, str | tuple[str, str, str]] = {}
    for canonical, own in names.items():
        if isinstance(own, str):
            table[LAYER + canonical] = layer + own
        else:
            q, k, v = own
            table[LAYER + canonical] = layer + q, layer + k, layer + v
    return table


@dataclass(frozen=True)
class TensorNames:
    """The names of one family, read in both directions."""

    table: Names

    def of(self, canonical: str) -> tuple[str, ...]:
        """The family's name of a tensor, or its three names of q, k and v. Raises KeyError if it has none."""
        layer = re.match(r"model\.layers\.(\d+)\.", canonical)
        if layer is None:
            return self._rows[canonical]
        own = self._rows[LAYER + canonical[layer.end() :]]
        return tuple(name.replace("{n}", layer[1]) for name in own)

    def canonical(self, name: str) -> str | None:
        """The canonical name of a family's tensor; None for a name that the family does not have."""
        for pattern, canonical in self._patterns:
            if found := pattern.fullmatch(name):
                return canonical.replace("{n}", found[1]) if "{n}" in canonical else canonical
        return None

    def mistakes(self) -> Iterator[str]:
        """Find what is wrong with the table, in a family of a user's own."""
        for canonical in EVERYWHERE:
            if canonical not in self.table:
                yield f"tensors lack {canonical!r}"
        for canonical, own in self.table.items():
            if canonical not in CANONICAL:
                yield f"tensors have {canonical!r}, which is no canonical name"
                continue
            names = (own,) if isinstance(own, str) else own
            if len(names) != 1 and (len(names) != 3 or canonical not in (WQKV, WQKV_BIAS)):
                yield f"tensors have {len(names)} names of {canonical!r}"
            for name in names:
                if name.count("{n}") != canonical.count("{n}"):
                    yield f"tensors call {canonical!r} {name!r}: a layer's number {{n}} belongs in both or in none"

    @cached_property
    def _rows(self) -> dict[str, tuple[str, ...]]:
        rows = {canonical: (own,) if isinstance(own, str) else tuple(own) for canonical, own in self.table.items()}
        return rows | {VALUE_HEAD: (VALUE_HEAD,)}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        return [
            (re.compile(re.escape(name).replace(r"\{n\}", r"(\d+)")), canonical)
            for canonical, own in self._rows.items()
            for name in own
        ]
