"""Canonical tensors under each family's names and back, and transformers' model filled with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.config import ModelConfig
from roll.families import find_family
from roll.families.tensors import CANONICAL, VALUE_HEAD
from roll.models.family_tensors import from_family, to_family
from roll.models.hf_layout import hf_shapes
from roll.models.transformers_model import as_family_names, build_transformers_model, canonical_tensors, load_tensors
from roll.models.weight_rules import RULES
from tests.families import HAVING_BIAS, NAMES

WQKV, BIAS = "model.layers.3.attention.wqkv.weight", "model.layers.3.attention.wqkv.bias"


def model_of(
    family: str = "llama", groups: int = 2, per_group: int = 2, head_dim: int = 2, layers: int = 1, **changes: Any
) -> ModelConfig:
    heads = groups * per_group
    sizes: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 11,
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "intermediate_size": 13,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 32,
    }
    return ModelConfig(**(sizes | changes))


def tensors_of(model: ModelConfig, head: str = "lm") -> dict[str, Tensor]:
    """Different numbers everywhere."""
    tensors, start = {}, 0
    for name, shape in hf_shapes(model, head).items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    return tensors


# Two groups of two query heads of size two: rows of wqkv are, group by group, two queries, a key and a value.
ROWS_BY_HAND = {"q": [0, 1, 2, 3, 8, 9, 10, 11], "k": [4, 5, 12, 13], "v": [6, 7, 14, 15]}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_wqkv_by_hand(family: str) -> None:
    model = model_of(family)
    wqkv = torch.arange(16.0).unsqueeze(1) * torch.ones(1, 8)  # row r holds r
    canonical = {WQKV: wqkv, BIAS: torch.arange(16.0)}
    apart = dict(to_family(model, canonical.items()))
    by_hand = {}
    for kind in ("weight", "bias"):
        by_hand |= {f"model.layers.3.self_attn.{x}_proj.{kind}": rows for x, rows in ROWS_BY_HAND.items()}
    assert {name: (x[:, 0] if x.ndim == 2 else x).tolist() for name, x in apart.items()} == by_hand
    joined = dict(from_family(model, apart))
    assert list(joined) == [WQKV, BIAS]
    assert all(torch.equal(joined[name], tensor) for name, tensor in canonical.items())


def test_wqkv_with_one_query_per_key_and_heads_of_their_own_size() -> None:
    # Multi-head attention: three groups of a query, a key and a value, two rows each, of a model of width five.
    model = model_of("qwen3", groups=3, per_group=1, hidden_size=5, head_dim=2)
    wqkv = torch.arange(18.0).unsqueeze(1) * torch.ones(1, 5)
    rows = [tensor[:, 0].tolist() for _, tensor in to_family(model, [(WQKV, wqkv)])]
    assert rows == [[0, 1, 6, 7, 12, 13], [2, 3, 8, 9, 14, 15], [4, 5, 10, 11, 16, 17]]


NAMES_BY_HAND = [
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


QKV_BIAS = [f"self_attn.{x}_proj.bias" for x in "qkv"]
QK_NORM = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]


@pytest.mark.parametrize(
    ("family", "bias", "after_qkv", "after_output"),
    [
        ("llama", False, [], []),
        ("llama", True, QKV_BIAS, ["self_attn.o_proj.bias"]),
        ("mistral", False, [], []),
        ("qwen2", False, QKV_BIAS, []),
        ("qwen3", False, QK_NORM, []),
        ("qwen3", True, QKV_BIAS + QK_NORM, ["self_attn.o_proj.bias"]),
    ],
)
def test_names_by_hand(family: str, bias: bool, after_qkv: list[str], after_output: list[str]) -> None:
    model = model_of(family, bias=bias)
    names = [name for name, _ in to_family(model, tensors_of(model).items())]
    layer = "model.layers.0."
    expected = [*NAMES_BY_HAND[:5], *[layer + name for name in after_qkv]]
    expected += [NAMES_BY_HAND[5], *[layer + name for name in after_output], *NAMES_BY_HAND[6:]]
    assert names == expected
    tied = model_of(family, bias=bias, tie_word_embeddings=True)
    assert [name for name, _ in to_family(tied, tensors_of(tied).items())] == names[:-1]


def test_internlm2_keeps_its_names() -> None:
    model = model_of("internlm2", bias=True)
    tensors = tensors_of(model)
    assert {"model.layers.0.attention.wqkv.bias", "model.layers.0.attention.wo.bias"} < tensors.keys()
    assert [(name, tensor) for name, tensor in to_family(model, tensors.items())] == list(tensors.items())


def test_every_parameter_is_made_of_tensors_that_families_name() -> None:
    assert {name for rule in RULES.values() for name in rule.hf} == {*CANONICAL, VALUE_HEAD}
    # And in some family each has a name.
    assert {name for family in NAMES for name in find_family(family).tensors} == set(CANONICAL)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from(["lm", "value"]),
    st.booleans(),
)
def test_there_and_back(
    family: str, groups: int, per_group: int, half_head: int, layers: int, head: str, bias: bool
) -> None:
    model = model_of(family, groups, per_group, 2 * half_head, layers, bias=bias and family in HAVING_BIAS)
    tensors = tensors_of(model, head)
    back = dict(from_family(model, dict(to_family(model, tensors.items()))))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", NAMES)
def test_transformers_model_is_filled_whole(family: str, tied: bool) -> None:
    bias = family in HAVING_BIAS and not tied
    model = model_of(family, groups=2, per_group=3, layers=2, tie_word_embeddings=tied, bias=bias)
    tensors = tensors_of(model)
    target = build_transformers_model(model)
    own = dict(to_family(model, tensors.items()))
    filled = load_tensors(target, model, own.items())
    parameters = {name: parameter.detach() for name, parameter in target.named_parameters()}
    assert filled == set(parameters)
    back = dict(canonical_tensors(model, parameters))
    assert back.keys() == tensors.keys() - ({"output.weight"} if tied else set())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in back.items())
    again = dict(as_family_names(model, parameters))
    assert again.keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.items())


def test_a_llama_describes_the_network_of_internlm2() -> None:
    model = model_of("internlm2", groups=2, per_group=3, layers=2, rope_theta=5e5, rms_norm_eps=1e-4)
    llama = build_transformers_model(model, torch.bfloat16)
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    assert not llama.training
    config = llama.config
    assert config.model_type == "llama"
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 2)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert config.rms_norm_eps == 1e-4
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert build_transformers_model(model_of("internlm2", bias=True)).config.attention_bias
    assert not config.mlp_bias
    assert config.hidden_act == "silu"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", (5,), r"model.norm.weight: got shape \(5,\), the model has \(8,\)"),
        ("v_head.weight", (1, 8), r"v_head.weight: got shape \(1, 8\), the model has no such tensor"),
        ("model.layers.1.mlp.up_proj.weight", (8,), "model.layers.1.mlp.up_proj.weight: .*no such tensor"),
        ("extra.weight", (8,), "extra.weight"),
    ],
)
def test_a_tensor_without_a_place_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=message):
        load_tensors(build_transformers_model(model), model, [(name, torch.zeros(shape))])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.extra.weight", r"model\.layers\.0\.extra\.weight: llama has no such tensor"),
        ("model.layers.0.mlp.up_proj.bias", "up_proj.bias: llama has no such tensor"),
        ("model.layers.0.self_attn.k_proj.weight", "k_proj.weight is joined with .*q_proj.weight and .*v_proj.weight"),
    ],
)
def test_what_has_no_canonical_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dict(from_family(model_of(), {name: torch.zeros(2, 2)}))
