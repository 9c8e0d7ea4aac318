"""What a model must be like so that its attention alone carries information from token to token.

Everything is asked of the configuration, the modules and the arguments that reach attention, never of class names. What
cannot be answered is refused: a model that mixes tokens elsewhere would run on its shards and be wrong without a sign.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

# RoPE whose frequencies follow the longest position of the input, of which a shard knows only its own.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

# Arguments of a model that reach attention and change nothing in it.
HARMLESS_ARGUMENTS = {
    "cache",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "labels",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "shift_labels",
    "use_cache",
}


def check_supported(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ValueError with every reason why this model cannot be split over its sequence."""
    found = list(_reasons(model, decoder))
    if found:
        raise UserError(f"{type(model).__name__} cannot be split over its sequence: {'; '.join(found)}")


def _reasons(model: PreTrainedModel, decoder: PreTrainedModel) -> Iterator[str]:
    config: Any = decoder.config
    if getattr(config, "is_encoder_decoder", False):
        yield "it is no decoder-only model"
    if getattr(model.config, "sub_configs", None):
        yield f"it has parts of their own kinds ({', '.join(model.config.sub_configs)})"
    if not (decoder._supports_attention_backend and decoder._can_set_attn_implementation()):
        yield "its attention does not go through transformers' attention interface, so that nothing would be patched"
    if model is not decoder and model.get_output_embeddings() is None:
        yield "its head does not compute one result per token, as far as one can see; dispatch its decoder instead"
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS)
    if unknown:
        yield f"layers of type {', '.join(unknown)} are not supported"
    if getattr(config, "kv_lora_rank", None):
        yield "multi-head latent attention (kv_lora_rank) is not supported"
    if any("sink" in name.rsplit(".", 1)[-1] for name, _ in decoder.named_parameters()):
        yield "attention sinks are not supported"
    mixers = {type(module).__name__ for module in decoder.modules() if isinstance(module, nn.RNNBase | _CONVOLUTIONS)}
    if mixers or getattr(decoder, "_is_stateful", False):
        yield f"tokens meet outside of attention ({', '.join(sorted(mixers)) or 'a recurrent state'})"
    ropes = sorted(_rope_types(config) & LENGTH_DEPENDENT_ROPE)
    if ropes:
        yield f"RoPE of type {', '.join(ropes)} depends on the length of the whole sequence"
    if any(_counts_positions(module) for module in decoder.modules()):
        yield "it counts positions itself, from its mask or its tokens, rather than from 0 in every row"
    missing = {"position_ids", "attention_mask"} - set(inspect.signature(decoder.forward).parameters)
    if missing:
        yield f"its forward takes no {' and no '.join(sorted(missing))}"


_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d


def _counts_positions(module: nn.Module) -> bool:
    """Whether a table of absolute positions is read elsewhere than at 0, 1, 2, ...: padding left out or an offset."""
    if hasattr(module, "create_position_ids_from_input_ids"):
        return True
    if not isinstance(module, nn.Embedding) or type(module) is nn.Embedding:
        return False
    return hasattr(module, "offset") or "attention_mask" in inspect.signature(module.forward).parameters


def _rope_types(config: Any) -> set[str]:
    """Of `rope_parameters`, which are one dict or one dict per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    dicts = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(each["rope_type"]) for each in dicts if each.get("rope_type")}


def check_arguments(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, is_causal: bool | None, others: dict[str, Any]
) -> None:
    """Raise ValueError if a layer asks its attention for something that is not done here.

    q, k and v are `[b, heads, s, d]`; `others` what it was called with besides. The same on all ranks.
    """
    where = type(module).__name__
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UserError(f"{where} is not causal: sequence parallelism supports causal attention only")
    if not (k.shape == v.shape and q.shape[2:] == k.shape[2:] and q.shape[1] % k.shape[1] == 0):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise UserError(f"{where} has q, k, v of shapes {shapes}: other lengths or head sizes are not supported")
    asked = [name for name, value in others.items() if name not in HARMLESS_ARGUMENTS and _is_given(value)]
    if asked:
        raise UserError(f"{where} passes {', '.join(sorted(asked))} to its attention, which is not supported")


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def check_mask(mask_function: Callable[..., Tensor], window: int | None) -> None:
    """Raise ValueError unless transformers' mask is causal, with exactly the window that the layer passes along.

    The mask of an index rather than a matrix: `mask_function(row, head, query, key)`. It is asked at the edges.
    """
    query = 1_000_000 + (window or 0)
    expected = {query: True, query + 1: False, 0: window is None}
    if window is not None:
        expected |= {query - window + 1: True, query - window: False}
    zero = torch.tensor(0)
    found = {key: bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key))) for key in expected}
    if found != expected:
        rule = "a causal mask" if window is None else f"a causal mask with a window of {window}"
        raise UserError(f"a layer passes sliding_window={window}, but transformers' mask for it is not {rule}")
