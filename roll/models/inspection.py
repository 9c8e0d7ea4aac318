"""What a split model looks like from one rank: its parameters, and the shape of everything in a forward pass.

Names and the order of dimensions are those of InternEvo's document on its data flow, so that a reader can lay it
beside: batch first, the first layer standing for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roll.models.hf_mapping import mapped_parameters
from roll.models.linears import SwiGLU
from roll.models.packed_sequence import PackedSequence
from roll.models.ulysses import UlyssesAttention
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


STEPS = (
    "input_ids",
    "tok_embeddings",
    "wqkv",
    "qkv by head",
    "q",
    "k",
    "v",
    "kv",
    "exchanged q",
    "exchanged kv",
    "exchanged context",
    "context",
    "wo",
    "w1",
    "w3",
    "w2",
    "norm",
    "output",
)
"""The order of the document, which is that of the computation but for q, k and v, which are parts of kv here."""


@torch.no_grad()
def forward_shapes(
    gpt: GPTModel, packed: PackedSequence, input_ids: Tensor, *, parallel_output: bool = True
) -> list[tuple[str, Shape]]:
    """(step, shape on this rank) of a forward pass over a model that is one pipeline stage.

    Each shape is of a tensor of that pass. On a GPU there are no w1 and w3: the fused kernel takes both as one tensor.

    Args:
        input_ids: `[b, s]`, this rank's part of a packed row or of unpacked rows.
    """
    found: dict[str, Shape] = {}

    def note(steps: Sequence[str | None], tensors: Any) -> None:
        """Megatron-Core's `[s, b, ...]` in the document's order."""
        several = tensors if isinstance(tensors, tuple) else (tensors,)
        for step, tensor in zip(steps, several, strict=False):
            if step is not None:
                tokens, rows, *rest = tensor.shape
                found[step] = rows, tokens, *rest

    layer = gpt.decoder.layers[0]
    attention, activation = layer.self_attention, layer.mlp.activation_func
    core = attention.core_attention
    with ExitStack() as hooks:

        def before(module: nn.Module, *steps: str | None) -> None:
            """Note the arguments of `module`."""
            handle = module.register_forward_pre_hook(lambda _, inputs: note(steps, inputs))
            hooks.callback(handle.remove)

        def after(module: nn.Module, *steps: str | None) -> None:
            """Note the results of `module`."""
            handle = module.register_forward_hook(lambda _, inputs, outputs: note(steps, outputs))
            hooks.callback(handle.remove)

        after(gpt.embedding, "tok_embeddings")
        after(attention.linear_qkv, "wqkv")
        before(attention.split_heads, "qkv by head")
        after(attention.split_heads, None, "kv")
        before(core, "q", "k", "v")
        before(core.join_heads, "context")
        if isinstance(core, UlyssesAttention):
            after(core.exchange, "exchanged q", "exchanged kv")
            before(core.local_attention.join_heads, "exchanged context")
        after(attention.linear_proj, "wo")
        if isinstance(activation, SwiGLU):
            before(activation.gated, "w1", "w3")
        after(layer.mlp.linear_fc2, "w2")
        after(gpt.decoder.final_layernorm, "norm")
        hidden = gpt(input_ids=input_ids, position_ids=None, attention_mask=None, packed_seq_params=packed)
    found["input_ids"] = tuple(input_ids.shape)
    found["output"] = tuple(gpt.head.logits(hidden, parallel_output=parallel_output).shape)
    return [(step, found[step]) for step in STEPS if step in found]
