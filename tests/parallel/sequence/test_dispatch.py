"""What dispatching changes and leaves alone, and what it refuses, on every rank alike."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from math import gcd, lcm
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roll.parallel.sequence import (
    destroy_sequence_parallel,
    dispatch_modules,
    dispatched_modules,
    init_sequence_parallel,
    sequence_parallel_groups,
    split_tensor,
    undispatch_modules,
)
from roll.parallel.sequence.attention import copies_of_kv
from tests.parallel.sequence.one_process import gradients, make_batch, reduced, reference, split_run
from tests.parallel.sequence.test_groups import refusal
from tests.parallel.sequence.tiny_models import SMALL, make_model
from tests.rank_pool import RankPool

TOKENS = make_batch("dense", "uneven").tokens
EXACT: dict[str, Any] = {"rtol": 0, "atol": 5e-6}


def split_logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=split_tensor(TOKENS), **inputs).logits


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 5e-6 * expected.abs().max())


def two_models() -> dict[str, bool]:
    """One configuration object, two models, of which one is dispatched: in eval mode, and after undoing it."""
    from transformers import AttentionInterface

    names = set(AttentionInterface._global_mapping)
    config = make_model().config
    torch.manual_seed(1)
    one, other = type(make_model())(config), type(make_model())(config)
    assert one.config is other.config
    with torch.no_grad():
        expected, expected_other = one(TOKENS).logits, other(TOKENS).logits
    with sequence_parallel_groups(dist.get_world_size()):
        one.eval()
        dispatch_modules(one)
        own = split_tensor(expected)
        found = {
            "eval": close(split_logits(one), own),
            "train": close(split_logits(one.train()), own),
            "the other": torch.equal(other(TOKENS).logits, expected_other),
            "positional": close(one(split_tensor(TOKENS)).logits, own),
            "decoder alone": close(one.lm_head(one.model(split_tensor(TOKENS)).last_hidden_state), own),
            "embeddings": close(one(inputs_embeds=one.model.embed_tokens(split_tensor(TOKENS))).logits, own),
            "dtypes of positions": close(
                split_logits(
                    one,
                    position_ids=split_tensor(torch.arange(32).unsqueeze(0)).to(
                        (torch.int32, torch.int64)[dist.get_rank()]
                    ),
                ),
                own,
            ),
            "both": False,
        }
        with dispatched_modules(other):
            found["both"] = close(split_logits(other), split_tensor(expected_other)) and close(split_logits(one), own)
        one.config.use_cache = False  # what is set meanwhile
        undispatch_modules(one)
        with torch.no_grad():
            found["undone"] = torch.equal(one(TOKENS).logits, expected)
        found["kept"] = one.config.use_cache is False
        found["implementation"] = one.config._attn_implementation == other.config._attn_implementation == "sdpa"
        found["no hooks"] = not any(m._forward_pre_hooks or m._forward_hooks for m in one.modules())
        found["no names"] = AttentionInterface._global_mapping.keys() == names
    return found


def test_two_models_of_which_one_is_dispatched(ranks: RankPool) -> None:
    for found in ranks.run(two_models, world_size=2):
        assert all(found.values()), found


def in_other_surroundings() -> dict[str, bool]:
    """Recomputed activations, several forwards before one backward, a wrapper around the model, no groups at all."""
    batches = [make_batch("packed", "uneven", seed=0), make_batch("padded", "uneven", seed=1)]
    found = {}
    model = make_model("qwen3", sliding_window=None)
    expected = [reference(model, batch)[2] for batch in batches]
    with sequence_parallel_groups(dist.get_world_size()):
        for name, checkpointing in (("recomputed", True), ("kept", False)):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
            model.zero_grad()
            with dispatched_modules(nn.Sequential(model)):
                losses = [split_run_loss(model, batch) for batch in batches]
                torch.stack(losses).sum().backward()  # each remembers its own documents
            total = reduced(gradients(model), "mean")
            found[name] = all(
                bool((total[key] - expected[0][key] - expected[1][key]).abs().max() <= 1e-5 * total[key].abs().max())
                for key in total
            )
    dispatch_modules(model)  # after the teardown nothing splits, and it says so at the call
    found["after teardown"] = "groups were destroyed" in refusal(lambda: model(TOKENS))
    undispatch_modules(model)
    return found


def split_run_loss(model: Any, batch: Any) -> torch.Tensor:
    from roll.parallel.sequence import reduce_sequence_parallel_loss, shift_labels, split_for_sequence_parallel

    tokens, labels, positions = split_for_sequence_parallel(
        batch.tokens, shift_labels(batch.labels), batch.position_ids
    )
    assert labels is not None
    mean = model(tokens, attention_mask=batch.attention_mask, position_ids=positions, shift_labels=labels).loss
    return reduce_sequence_parallel_loss(mean, (labels != -100).sum())


def test_recomputation_accumulation_and_wrappers(ranks: RankPool) -> None:
    for found in ranks.run(in_other_surroundings, world_size=2):
        assert all(found.values()), found


def test_without_groups_it_is_the_model_itself() -> None:
    """Before init a sequence is on one rank: documents by cu_seqlens."""
    model = make_model("llama")
    batch = make_batch("cu_seqlens", "uneven")
    expected_logits, expected_loss, expected = reference(model, batch)
    model.zero_grad()
    with dispatched_modules(model):
        logits, loss = split_run(model, batch)
    torch.testing.assert_close(logits, expected_logits, **EXACT)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    for name, value in gradients(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5 * float(expected[name].abs().max()))


def messages() -> dict[str, list[int]]:
    """Elements that each all-to-all of a forward pass moves, of 2 rows of 8 tokens on this rank."""
    found = {}
    with sequence_parallel_groups(4):
        for name, kv_heads in (("mha", 8), ("gqa", 2), ("mqa", 1)):
            model = make_model(num_key_value_heads=kv_heads, num_hidden_layers=1)
            with (
                dispatched_modules(model),
                patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
            ):
                split_logits(model)
            found[name] = [call.args[1].numel() for call in sent.call_args_list]
    return found


def test_kv_heads_travel_only_as_often_as_needed(ranks: RankPool) -> None:
    """Head size 8: all query heads with 8, 4 and 4 kv heads for keys and for values, then the context."""
    tokens = 2 * 8
    for found in ranks.run(messages, world_size=4):
        assert found == {
            "mha": [tokens * (8 + 2 * 8) * 8, tokens * 8 * 8],
            "gqa": [tokens * (8 + 2 * 4) * 8, tokens * 8 * 8],
            "mqa": [tokens * (8 + 2 * 4) * 8, tokens * 8 * 8],
        }


@given(kv_heads=st.integers(1, 12), ranks=st.integers(1, 12))
def test_copies_make_the_least_common_multiple(kv_heads: int, ranks: int) -> None:
    assert kv_heads * copies_of_kv(kv_heads, ranks) == lcm(kv_heads, ranks) == kv_heads * ranks // gcd(kv_heads, ranks)


def what_is_said() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("roll.parallel.sequence.dispatched_model")
    logger.addHandler(handler)
    with sequence_parallel_groups(2):
        for heads in (8, 9):
            model = make_model("mistral", num_attention_heads=heads, num_key_value_heads=1, sliding_window=None)
            with dispatched_modules(model):
                split_logits(model)
                split_logits(model)
    logger.removeHandler(handler)
    return said


def test_gathered_keys_are_said_once(ranks: RankPool) -> None:
    assert ranks.run(what_is_said, world_size=2) == [
        [
            "9 attention heads do not divide by 2 sequence-parallel ranks: keys and values are gathered instead of "
            "exchanging heads"
        ],
        [],
    ]


MISUSES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "rows differ": (lambda rank: {"input_ids": TOKENS[: 1 + rank, :4]}, "shape differs between the ranks"),
    "lengths differ": (lambda rank: {"input_ids": TOKENS[:, : 4 + rank]}, "shape differs .* \\(2, 4\\), \\(2, 5\\)"),
    "no tokens": (lambda rank: {"input_ids": TOKENS[:, :0]}, "parts of no tokens"),
    "nothing": (lambda rank: {"input_ids": None}, "without input_ids and inputs_embeds"),
    "split mask": (lambda rank: {"attention_mask": torch.ones(2, 16)}, "attention_mask must be that of the whole rows"),
    "4-D mask": (lambda rank: {"attention_mask": torch.ones(2, 1, 16, 32)}, "attention_mask must be that of the whole"),
    "masks differ": (lambda rank: {"attention_mask": torch.ones(2, 32) - rank}, "attention_mask differs between"),
    "hole": (lambda rank: {"attention_mask": 1 - torch.eye(32)[3:5]}, "padding inside row 0, before token 4"),
    "whole positions": (lambda rank: {"position_ids": torch.arange(32).unsqueeze(0)}, "those of this rank's part"),
    "positions on one": (lambda rank: {"position_ids": split_tensor(TOKENS)} if rank else {}, "position_ids differs"),
    "part's cu_seqlens": (lambda rank: {"cu_seq_lens_q": torch.tensor([0, 32])}, "rise from 0 to the 2 x 32 tokens"),
    "cu_seqlens differ": (lambda rank: {"cu_seq_lens_q": torch.tensor([0, 9 + rank, 64])}, "cu_seq_lens_q differs"),
    "two cu_seqlens": (
        lambda rank: {"cu_seq_lens_q": torch.tensor([0, 64]), "cu_seq_lens_k": torch.tensor([0, 2, 64])},
        "cu_seq_lens_q and cu_seq_lens_k must be the same",
    ),
    "cache": (lambda rank: {"use_cache": True}, "has no cache, so it cannot generate"),
    "attentions": (lambda rank: {"output_attentions": True}, "output_attentions is not supported"),
    "some logits": (lambda rank: {"logits_to_keep": 1}, "logits_to_keep would keep the end of every part"),
    "logits by index": (lambda rank: {"logits_to_keep": torch.tensor([0, 1])} if rank else {}, "rank 1 .* logits_to_k"),
    "masks by layer": (
        lambda rank: {"attention_mask": {"full_attention": torch.ones(2, 32)}} if rank else {},
        "rank 1 of the group: attention_mask must be that of the whole rows, .* got dict",
    ),
    "half a mask": (lambda rank: {"attention_mask": torch.full((2, 32), 0.5)}, "attention_mask must be of zeros"),
    "listed cu_seqlens": (
        lambda rank: {"cu_seq_lens_q": [0, 64]} if rank else {},
        "rank 1 of the group: cu_seq_lens_q must be a tensor of integers, got list",
    ),
    "listed positions": (lambda rank: {"position_ids": [0]} if rank else {}, "rank 1 .* position_ids must .* got list"),
    "float positions": (lambda rank: {"position_ids": torch.zeros(1, 16)}, r"position_ids must be .* torch\.float32"),
    "a row alone": (
        lambda rank: {"input_ids": TOKENS[0, :16]} if rank else {},
        r"rank 1 .* \[rows, tokens\] .*\(16,\)",
    ),
    "generation": (lambda rank: {"logits_to_keep": 1, "use_cache": True}, "cannot generate"),
    "unknown argument": (lambda rank: {"s_aux": torch.ones(8)}, "passes s_aux to its attention"),
    "not causal": (lambda rank: {"is_causal": False}, "more than a causal mask"),
}


def misuse() -> dict[str, str]:
    model = make_model()
    with sequence_parallel_groups(2), dispatched_modules(model):
        found = {
            name: refusal(lambda make=make: model(**({"input_ids": split_tensor(TOKENS)} | make(dist.get_rank()))))
            for name, (make, _) in MISUSES.items()
        }
        found["after all that"] = str(tuple(split_logits(model).shape))
    return found


def test_misuse_is_refused_on_every_rank(ranks: RankPool) -> None:
    first, second = ranks.run(misuse, world_size=2)
    assert first == second
    assert first.pop("after all that") == "(2, 16, 48)"
    for name, (_, message) in MISUSES.items():
        with pytest.raises(ValueError, match=message):
            raise ValueError(f"{name}: {first[name]}")


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}, "attention sinks"),
    ("deepseek_v3", {"n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8}, "multi-head latent attention"),
    ("qwen3_next", {"num_experts": 4}, "layers of type linear_attention"),
    ("lfm2", {"full_attn_idxs": [0], "layer_types": ["full_attention", "conv"]}, "type conv .*Conv1d"),
    ("llama4_text", {"num_local_experts": 2}, "layers of type chunked_attention"),
    ("mamba", {}, "does not go through transformers' attention interface, so that nothing would be patched"),
    ("falcon_h1", {}, "tokens meet outside of attention"),
    ("bloom", {}, "its forward takes no position_ids"),
    ("opt", {"ffn_dim": 48}, "it counts positions itself"),
    ("biogpt", {}, "it counts positions itself"),
    ("roberta", {"is_decoder": True}, "it counts positions itself"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "RoPE of type dynamic"),
]


@pytest.mark.parametrize(("family", "settings", "message"), UNSUPPORTED, ids=[case[0] for case in UNSUPPORTED])
def test_models_that_cannot_be_split(family: str, settings: dict[str, Any], message: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | settings)))
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be split over its sequence: .*{message}"):
        dispatch_modules(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not model.config._attn_implementation.startswith("sequence_parallel")


def test_heads_that_are_not_per_token() -> None:
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    model = AutoModelForSequenceClassification.from_config(LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match=r"does not compute one result per token.* dispatch its decoder instead"):
        dispatch_modules(model)
    with dispatched_modules(model.model):
        assert model.model(TOKENS).last_hidden_state.shape == (2, 32, 32)


def test_a_model_that_adds_to_its_mask() -> None:
    model = make_model("gemma3_text", use_bidirectional_attention=True)
    with dispatched_modules(model), pytest.raises(ValueError, match="more than a causal mask"):
        model(TOKENS)


def test_a_window_that_the_mask_does_not_have() -> None:
    """A layer that names another window than its mask has: one of the two is what the model means, but which?"""
    model = make_model("qwen3")
    model.model.layers[1].self_attn.sliding_window = 5
    with dispatched_modules(model), pytest.raises(ValueError, match="passes sliding_window=5, but transformers' mask"):
        model(TOKENS)


def test_a_layer_without_the_dispatched_attention() -> None:
    model = make_model()

    class Itself(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model.model.layers[0].self_attn = Itself()
    with dispatched_modules(model), pytest.raises(ValueError, match=r"has 2 layers, but .* called 1 times"):
        model(TOKENS)


def test_dispatching_twice_copying_and_what_is_no_model() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="Linear contains no transformers model"):
        dispatch_modules(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not dispatched"):
        undispatch_modules(model)
    with dispatched_modules(model):
        for part in (model, model.model, nn.Sequential(model)):
            with pytest.raises(ValueError, match="is dispatched already"):
                dispatch_modules(part)
        with pytest.raises(TypeError, match="a dispatched model cannot be copied"):
            copy.deepcopy(model)
    copy.deepcopy(model)


def dispatched_before_init() -> dict[str, str]:
    """The groups are those of the call, not those of the time of dispatching."""
    model = make_model()
    with torch.no_grad():
        expected = model(TOKENS).logits
    dispatch_modules(model)
    found = {"before": str(close(model(TOKENS).logits, expected))}
    init_sequence_parallel(2)
    found["during"] = str(close(split_logits(model), split_tensor(expected)))
    destroy_sequence_parallel()
    found["after"] = refusal(lambda: model(TOKENS))
    return found


def test_groups_are_asked_at_the_call(ranks: RankPool) -> None:
    for found in ranks.run(dispatched_before_init, world_size=2):
        assert found["before"] == found["during"] == "True"
        assert found["after"].startswith("RuntimeError: the sequence-parallel groups were destroyed")
