"""What a split model looks like from one rank: its parameters, and the shape of everything in a forward pass.

Names and the order of dimensions are those of InternEvo's document on its data flow, so that a reader can lay it
beside: batch first, the first layer standing for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.config import ModelConfig
from roll.models.hf_mapping import mapped_parameters
from roll.models.packed_sequence import PackedSequence
from roll.parallel.state import ParallelState

Shape = tuple[int, ...]


def local_shapes(gpt: GPTModel, state: ParallelState) -> dict[str, Shape]:
    """Hugging Face name to the shape of this rank's part, of every tensor of this pipeline stage."""
    return {
        name: tuple(part.shape)
        for mapped in mapped_parameters(gpt, state.mode)
        for name, part in zip(mapped.hf_names, mapped.parts(), strict=True)
    }


def module_tree(module: nn.Module, name: str = "model", depth: int = 0) -> Iterator[str]:
    """One line per module and parameter: `name: Class`, and `name [shape of this rank's part]`."""
    indent = "  " * depth
    yield f"{indent}{name}: {type(module).__name__.removeprefix('FSDP')}"
    for parameter_name, parameter in module.named_parameters(recurse=False):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        yield f"{indent}  {parameter_name} {list(local.shape)}"
    for child_name, child in module.named_children():
        if isinstance(child, (IdentityOp, IdentityFuncOp)):
            continue
        yield from module_tree(child, child_name, depth + 1)


@torch.no_grad()
def forward_shapes(
    gpt: GPTModel, model: ModelConfig, packed: PackedSequence, input_ids: Tensor, *, parallel_output: bool = True
) -> list[tuple[str, Shape]]:
    """(step, shape on this rank) of a forward pass over a model that is one pipeline stage.

    Args:
        input_ids: `[b, s]`, this rank's part of a packed row or of unpacked rows.
    """
    steps: list[tuple[str, Shape]] = []

    def note(step: str, *shape: int) -> None:
        steps.append((step, shape))

    def embedded(_: nn.Module, inputs: Any, kwargs: Any, output: Tensor) -> None:
        note("input_ids", *kwargs["input_ids"].shape)
        note("tok_embeddings", *_batch_first(output))

    def projected(_: nn.Module, inputs: Any, output: Any) -> None:
        rows, tokens, width = _batch_first(output[0])
        per_group = model.num_attention_heads // model.num_key_value_heads + 2
        note("wqkv", rows, tokens, width)
        note("qkv by head", rows, tokens, width // (per_group * model.head_dim), per_group, model.head_dim)

    def before_attention(label: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any) -> None:
            query, key, value = inputs[:3]
            note(f"{label}q", *_batch_first(query))
            if not label:
                note("k", *_batch_first(key))
                note("v", *_batch_first(value))
            rows, tokens, heads, size = _batch_first(key)
            note(f"{label}kv", rows, tokens, 2, heads, size)

        return hook

    def after_attention(label: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            rows, tokens, width = _batch_first(output)
            note(f"{label}context", rows, tokens, width // model.head_dim, model.head_dim)

        return hook

    def gated(_: nn.Module, inputs: Any, output: Any) -> None:
        rows, tokens, width = _batch_first(output[0])
        note("w1", rows, tokens, width // 2)
        note("w3", rows, tokens, width // 2)

    def layer_output(step: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            note(step, *_batch_first(output[0] if isinstance(output, tuple) else output))

        return hook

    layer = gpt.decoder.layers[0]
    attention = layer.self_attention
    local = getattr(attention.core_attention, "local_attention", None)
    with ExitStack() as hooks:

        def hook(handle: Any) -> None:
            hooks.callback(handle.remove)

        hook(gpt.embedding.register_forward_hook(embedded, with_kwargs=True))
        hook(attention.linear_qkv.register_forward_hook(projected))
        hook(attention.core_attention.register_forward_pre_hook(before_attention("")))
        if local is not None:
            hook(local.register_forward_pre_hook(before_attention("exchanged ")))
            hook(local.register_forward_hook(after_attention("exchanged ")))
        hook(attention.core_attention.register_forward_hook(after_attention("")))
        hook(attention.linear_proj.register_forward_hook(layer_output("wo")))
        hook(layer.mlp.linear_fc1.register_forward_hook(gated))
        hook(layer.mlp.linear_fc2.register_forward_hook(layer_output("w2")))
        hook(gpt.decoder.final_layernorm.register_forward_hook(layer_output("norm")))
        hidden = gpt(input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
    note("output", *gpt.head.logits(hidden, parallel_output=parallel_output).shape)
    return steps


def _batch_first(x: Tensor) -> Shape:
    """Megatron-Core's `[s, b, ...]` in the document's order."""
    tokens, rows, *rest = x.shape
    return rows, tokens, *rest
