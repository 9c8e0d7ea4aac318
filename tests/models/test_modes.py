"""What distinguishes the modes: which collectives run, when weights are whole, and where every number goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from roll.checkpoint.hf import load_weights
from roll.checkpoint.tensor_sources import tensor_source
from roll.config import ModelConfig, ParallelSettings
from roll.data.sequence_split import SequenceSplit
from roll.models.embedding import HiddenParallelEmbedding
from roll.models.gpt import build_model, megatron_config
from roll.models.packed_sequence import PackedSequence
from roll.models.ulysses import heads_to_ranks, ranks_to_heads
from roll.parallel.sequence_gather import gather_sequence
from roll.parallel.state import ParallelState, parallel_groups
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, merge_stages, settings, write_tiny

ROWS, LENGTH = 2, 8
MODES: list[tuple[int, dict[str, Any]]] = [
    (2, {"mode": "mtp", "tp": 2}),
    (2, {"mode": "msp", "tp": 2}),
    (4, {"mode": "fsp", "tp": 4}),
    (4, {"mode": "isp", "sp": 4, "wp": 2}),
]


def unpacked_ids() -> Tensor:
    return torch.randint(3, TINY.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))


def token_weights() -> Tensor:
    return torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(4))


# --- where every number goes


def exchanges(settings: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """(what came out, what had to) of each exchange, on tensors that hold every element's own number."""
    with parallel_groups(ParallelSettings(**settings)) as state:
        rank, size = state.cp.rank(), state.cp.size()
        whole = torch.arange(8 * 3 * 4 * 5).view(8, 3, 4, 5)  # tokens, rows, heads, head size
        own_tokens, own_heads = whole.chunk(size, 0)[rank], whole.chunk(size, 2)[rank]
        return {
            "heads": (heads_to_ranks(own_tokens, state.cp), own_heads),
            "back": (ranks_to_heads(own_heads, state.cp), own_tokens),
        }


def test_heads_are_exchanged(ranks: RankPool) -> None:
    for sp in (2, 4):
        for results in ranks.run(exchanges, {"mode": "isp", "sp": sp}, world_size=sp):
            for name, (actual, expected) in results.items():
                assert torch.equal(actual, expected), name


def embedded(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    parallel = ParallelSettings(**settings)
    with parallel_groups(parallel) as state:
        config = megatron_config(TINY, parallel, torch.float32)
        table = torch.arange(40.0 * 48).view(40, 48)
        module = HiddenParallelEmbedding(40, config, state.tp)
        module.weight.data.copy_(table.chunk(state.tp.size(), dim=1)[state.tp.rank()])
        ids = unpacked_ids()
        expected = table[ids.t()]
        if parallel.sequence_parallel:
            expected = expected.chunk(state.tp.size(), dim=0)[state.tp.rank()]
        return module(ids).detach(), expected


@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
def test_every_token_gets_its_whole_embedding(ranks: RankPool, mode: str) -> None:
    for actual, expected in ranks.run(embedded, {"mode": mode, "tp": 4}, world_size=4):
        assert torch.equal(actual, expected)


# --- collectives


@contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Counts the all-gathers of Megatron-Core's tensor-parallel layers, which took the function at import."""
    count = [0]
    gather = mappings.dist_all_gather_func

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return gather(*args, **kwargs)

    with (
        patch.object(mappings, "dist_all_gather_func", counting),
        patch.object(layers, "dist_all_gather_func", counting),
    ):
        yield count


def gathers_per_pass(settings: dict[str, Any]) -> tuple[int, int, float]:
    """All-gathers in forward and in backward, and the loss."""
    parallel = ParallelSettings(**settings)
    with parallel_groups(parallel) as state:
        gpt = build_model(TINY, parallel, state, dtype=torch.float32, head="lm").train()
        load_weights(gpt, tensor_source(Path(), TINY, init="random", head="lm", seed=0), state)
        ids = unpacked_ids()
        with counted_gathers() as count:
            loss = weighted_loss(gpt, ids, state)
            forward = count[0]
            loss.backward()
            return forward, count[0] - forward, float(loss)


def weighted_loss(gpt: Any, ids: Tensor, state: ParallelState, length: int = LENGTH) -> Tensor:
    """A loss of unpacked rows in which every token counts differently."""
    split = SequenceSplit(ParallelSettings(mode="isp", sp=state.cp.size()), state.cp.rank())
    packed = PackedSequence.unpacked(ROWS, length, split)
    hidden = gpt(input_ids=packed.own(ids), position_ids=None, attention_mask=None, packed_seq_params=packed)
    targets = packed.own(ids.roll(-1, dims=1))
    log_probs, _ = gpt.head.log_probs(hidden, targets, temperature=1.0, chunk=1 << 20)
    return -(gather_sequence(log_probs, state.cp) * token_weights())[:, :-1].sum()


def test_fsp_gathers_once_more_per_column_parallel_input_in_backward(ranks: RankPool) -> None:
    msp, fsp = (ranks.run(gathers_per_pass, {"mode": mode, "tp": 2}, world_size=2)[0] for mode in ("msp", "fsp"))
    inputs = 2 * TINY.num_hidden_layers + 1  # wqkv, and w1 with w3, of each layer; the head.
    assert msp[0] == fsp[0] == inputs
    assert fsp[1] - msp[1] == inputs
    assert fsp[2] == msp[2]


def gathers_ahead(settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Weight gathers that have begun when each layer computes; numbers that the rank holds after the pass."""
    parallel = ParallelSettings(**settings)
    with parallel_groups(parallel) as state:
        gpt = build_model(TINY, parallel, state, dtype=torch.float32, head="lm").eval()
        load_weights(gpt, tensor_source(Path(), TINY, init="random", head="lm", seed=0), state)
        begun, at_layer = [0], []
        gather = dist.all_gather_single

        def counting(*args: Any, **kwargs: Any) -> Any:
            begun[0] += 1
            return gather(*args, **kwargs)

        for layer in gpt.decoder.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: at_layer.append(begun[0]))
        with patch.object(dist, "all_gather_single", counting), torch.no_grad():
            weighted_loss(gpt, unpacked_ids(), state)
        return at_layer, [p.to_local().numel() for p in gpt.parameters()]


def test_isp_fetches_the_next_block_while_one_computes_and_frees_each(ranks: RankPool) -> None:
    for at_layer, held in ranks.run(gathers_ahead, {"mode": "isp", "wp": 2}, world_size=2):
        # The last norm, the embedding, and every layer: one gather each. Layer n computes when n + 1 is on its way.
        assert at_layer == [2 + 2, 2 + 3, 2 + 4, 2 + 4]
        whole = sum(tensor.numel() for tensor in _tensors())
        assert sum(held) == whole // 2


def _tensors() -> list[Tensor]:
    from roll.checkpoint.tensor_sources import RandomTensors

    source = RandomTensors(TINY, "lm", 0)
    return [source.part(name, None, 0, 1) for name in source.shapes]


# --- unpacked rows, more than one: [micro_bsz, seq_len] without cu_seqlens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def unpacked_step(folder: Path, layout: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    config = settings(folder, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        strategy.grads.zero()
        gpt: Any = strategy.gpt
        loss = weighted_loss(gpt, unpacked_ids(), state)
        loss.backward()
        if gpt.config.finalize_model_grads_func is not None:
            gpt.config.finalize_model_grads_func([strategy.model], None, pg_collection=state.megatron)
        strategy.grads.collect()
        return float(loss), merge_stages(dict(strategy.gradients()))


@pytest.fixture(scope="module")
def unpacked_reference(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """transformers' Llama on the same rows."""
    strategy = HfStrategy(settings(folder, "hf"))
    strategy.initialize()
    ids = unpacked_ids()
    log_probs = strategy.network(input_ids=ids).logits.log_softmax(-1)
    picked = log_probs.gather(-1, ids.roll(-1, dims=1).unsqueeze(-1)).squeeze(-1)
    loss = -(picked * token_weights())[:, :-1].sum()
    loss.backward()
    return float(loss), dict(strategy.gradients())


@pytest.mark.parametrize(("world_size", "layout"), MODES, ids=str)
def test_unpacked_rows(
    ranks: RankPool, folder: Path, unpacked_reference: Any, world_size: int, layout: dict[str, Any]
) -> None:
    expected_loss, expected = unpacked_reference
    for loss, gradients in ranks.run(unpacked_step, folder, layout, world_size=world_size):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert_same_gradients(gradients, expected)


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-5, f"{name}: relative error {error:.2e}"


# --- key-value heads: one for all queries, shared by several, one for each


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_numbers_of_key_value_heads(ranks: RankPool, tmp_path: Path, kv_heads: int) -> None:
    model = ModelConfig(**(TINY.model_dump() | {"num_key_value_heads": kv_heads}))
    folder = write_tiny(tmp_path / "model", model)
    reference = HfStrategy(settings(folder, "hf"))
    reference.initialize()
    ids = unpacked_ids()
    picked = reference.network(input_ids=ids).logits.log_softmax(-1).gather(-1, ids.roll(-1, dims=1).unsqueeze(-1))
    (-(picked.squeeze(-1) * token_weights())[:, :-1].sum()).backward()
    expected = dict(reference.gradients())
    layouts: list[tuple[int, dict[str, Any]]] = [(4, {"mode": "isp", "sp": 4, "wp": 2})]
    if kv_heads > 1:
        layouts.append((2, {"mode": "fsp", "tp": 2}))
    for world_size, layout in layouts:
        for _, gradients in ranks.run(unpacked_step, folder, layout, world_size=world_size):
            assert_same_gradients(gradients, expected)


# --- rows that do not split


def refused_rows(folder: Path, layout: dict[str, Any]) -> str:
    config = settings(folder, **layout)
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        with pytest.raises(ValueError, match="would fit") as refusal:
            weighted_loss(strategy.gpt, unpacked_ids()[:, :7], state, length=7)
        return str(refusal.value)


@pytest.mark.parametrize("layout", [{"mode": "fsp", "tp": 2}, {"mode": "isp", "sp": 2}], ids=str)
def test_rows_that_do_not_split_are_refused_on_every_rank(
    ranks: RankPool, folder: Path, layout: dict[str, Any]
) -> None:
    message = "7 tokens of a row do not split over 2 ranks of the sequence; 8 would fit"
    assert ranks.run(refused_rows, folder, layout, world_size=2) == [message] * 2
