"""InternLM2's tensors under Llama's names and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.config import ModelConfig
from roll.models.hf_layout import hf_shapes
from roll.models.llama import build_llama, internlm2_tensors, llama_tensors, load_llama_tensors


def model_of(groups: int = 2, per_group: int = 2, head_dim: int = 2, layers: int = 1) -> ModelConfig:
    heads = groups * per_group
    return ModelConfig(
        vocab_size=11,
        hidden_size=heads * head_dim,
        intermediate_size=13,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=32,
    )


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


def test_wqkv_by_hand() -> None:
    model = model_of()
    wqkv = torch.arange(16.0).unsqueeze(1) * torch.ones(1, 8)  # row r holds r
    apart = dict(llama_tensors(model, [("model.layers.3.attention.wqkv.weight", wqkv)]))
    rows = {name: tensor[:, 0].tolist() for name, tensor in apart.items()}
    assert rows == {f"model.layers.3.self_attn.{x}_proj.weight": rows for x, rows in ROWS_BY_HAND.items()}
    joined = dict(internlm2_tensors(model, apart))
    assert list(joined) == ["model.layers.3.attention.wqkv.weight"]
    assert torch.equal(joined["model.layers.3.attention.wqkv.weight"], wqkv)


def test_wqkv_with_one_query_per_key() -> None:
    # Multi-head attention: three groups of a query, a key and a value, one row each... of head size two.
    model = model_of(groups=3, per_group=1)
    wqkv = torch.arange(18.0).unsqueeze(1) * torch.ones(1, 6)
    apart = dict(llama_tensors(model, [("model.layers.0.attention.wqkv.weight", wqkv)]))
    rows = [tensor[:, 0].tolist() for tensor in apart.values()]
    assert rows == [[0, 1, 6, 7, 12, 13], [2, 3, 8, 9, 14, 15], [4, 5, 10, 11, 16, 17]]


def test_names_by_hand() -> None:
    names = [name for name, _ in llama_tensors(model_of(), tensors_of(model_of()).items())]
    assert names == [
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


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 12), st.sampled_from(["lm", "value"]))
def test_there_and_back(groups: int, per_group: int, half_head: int, layers: int, head: str) -> None:
    model = model_of(groups, per_group, 2 * half_head, layers)
    tensors = tensors_of(model, head)
    back = dict(internlm2_tensors(model, dict(llama_tensors(model, tensors.items()))))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_a_llama_is_filled_whole() -> None:
    model = model_of(groups=2, per_group=3, layers=2)
    tensors = tensors_of(model)
    llama = build_llama(model)
    filled = load_llama_tensors(llama, model, tensors.items())
    parameters = dict(llama.named_parameters())
    assert filled == set(parameters)
    back = dict(internlm2_tensors(model, {name: parameter.detach() for name, parameter in parameters.items()}))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_llama_describes_the_same_network() -> None:
    model = model_of(groups=2, per_group=3, layers=2).model_copy(update={"rope_theta": 5e5, "rms_norm_eps": 1e-4})
    llama = build_llama(model, torch.bfloat16)
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert not llama.training
    config = llama.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 2)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.rms_norm_eps == 1e-4
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias
    assert config.hidden_act == "silu"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.weight", (5,), r"model.norm.weight: got shape \(5,\), the model has \(8,\)"),
        ("v_head.weight", (1, 8), r"v_head.weight: got shape \(1, 8\), the model has no such tensor"),
        ("model.layers.1.ffn_norm.weight", (8,), "model.layers.1.post_attention_layernorm.weight: .*no such tensor"),
        ("model.layers.0.extra.weight", (8,), "model.layers.0.extra.weight"),
        ("extra.weight", (8,), "extra.weight"),
    ],
)
def test_a_tensor_without_a_place_is_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    model = model_of()
    with pytest.raises(ValueError, match=message):
        load_llama_tensors(build_llama(model), model, [(name, torch.zeros(shape))])
