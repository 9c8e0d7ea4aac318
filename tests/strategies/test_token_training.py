"""Supervised training on packed data: the numbers of one process and of single sentences, under every mode."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.config import OptimizerSettings
from roll.data import (
    PackBatchSampler,
    PackedDataset,
    PackedLoader,
    data_process,
    load_accum_batches,
    load_batch,
)
from roll.data.packs import IGNORED
from roll.data.sources.lists import ListSource
from roll.errors import UserError
from roll.parallel.state import ParallelState, parallel_groups
from roll.strategies import HfStrategy, MegatronTrainStrategy
from tests.layouts import name_of
from tests.rank_pool import RankPool
from tests.strategies.tiny import TINY, merge_stages, settings, write_tiny

STEPS = 10
# Twelve packs' worth of tokens in sentences of 1 to 20 tokens: packs of 16 cut through many of them.
PACK = {"micro_bsz": 2, "seq_len": 8}
MODES: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"mode": "msp", "tp": 2}),
    (2, {"mode": "fsp", "tp": 2}),
    (2, {"mode": "isp", "sp": 2, "wp": 2}),
    (2, {"mode": "isp", "wp": 2}),  # dp 2
    (2, {}),  # dp 2
    (2, {"pp": 2}),
    (2, {"cp": 2}),
    (2, {"cp": 2, "cp_comm": "all_gather"}),
    (4, {"mode": "fsp", "tp": 2, "cp": 2, "cp_comm": "ring"}),
    (3, {"cp": 3, "cp_comm": "ring"}),  # six chunks, which rows of 8 and of 16 do not divide into
]


def sentences(count: int = 40, longest: int = 20) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(1, TINY.vocab_size) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def strategy_of(folder: Path, layout: dict[str, Any], state: ParallelState) -> MegatronTrainStrategy:
    strategy = MegatronTrainStrategy(settings(folder, **layout, optimizer=OptimizerSettings(lr=1e-3)), state)
    strategy.initialize()
    return strategy


def processing(state: ParallelState, *, packed: bool, pack: dict[str, int] = PACK) -> Any:
    return data_process(
        use_packed_dataset=packed, mode=state.mode, sp_rank=state.cp.rank(), sp_size=state.cp.size(), **pack
    )


def ten_losses(folder: Path, layout: dict[str, Any], packed: bool) -> list[float]:
    """The losses of steps of two packs, and last the held-out loss, as this rank reports them."""
    layout = dict(layout)
    with parallel_groups(settings(folder, **layout).parallel) as state:
        strategy = strategy_of(folder, layout, state)
        dp = state.degrees.dp
        dataset = PackedDataset(ListSource(sentences()), **PACK, use_packed_dataset=packed, seed=3)
        sampler = PackBatchSampler(len(dataset), micro_num=2 // dp, dp_rank=state.at.dp, dp_size=dp)
        loader = PackedLoader(dataset, sampler, prefetch=0)
        process = processing(state, packed=packed)
        losses = []
        for _ in range(STEPS):
            batch, _ = load_batch(loader)
            losses.append(strategy.train_tokens(list(load_accum_batches(batch, process))).get("loss", float("nan")))
        batch, _ = load_batch(loader)
        losses.append(strategy.token_loss(list(load_accum_batches(batch, process))))
        loader.close()
        assert math.isfinite(losses[-1]) == state.is_last_stage  # On every rank of it, whether it reports or not.
        return losses if state.is_last_stage else []


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_ten_losses_are_the_same_under_every_mode(ranks: RankPool, folder: Path, packed: bool) -> None:
    (expected,) = ranks.run(ten_losses, folder, {}, packed, world_size=1)
    assert len(set(expected)) == STEPS + 1  # the model moves, and so do the data
    for world_size, layout in MODES if packed else [*MODES[2:5], *MODES[-3:]]:
        reported = [losses for losses in ranks.run(ten_losses, folder, layout, packed, world_size=world_size) if losses]
        assert reported
        for losses in reported:
            # 1e-5 of the loss: ten optimizer steps enlarge what sums in another order leave in the seventh digit.
            assert losses == pytest.approx(expected, rel=1e-5), name_of(layout)


def one_step(
    folder: Path, layout: dict[str, Any], samples: list[list[int]], pack: dict[str, int], micro_num: int
) -> dict[str, Any]:
    layout = dict(layout)
    with parallel_groups(settings(folder, **layout).parallel) as state:
        strategy = strategy_of(folder, layout, state)
        dataset = PackedDataset(ListSource(samples), **pack)
        sampler = PackBatchSampler(len(dataset), micro_num=micro_num)
        batch, _ = load_batch(PackedLoader(dataset, sampler, prefetch=0))
        process = processing(state, packed=True, pack=pack)
        metrics = strategy.train_tokens(list(load_accum_batches(batch, process)))
        return {"metrics": metrics, "gradients": merge_stages(dict(strategy.gradients()))}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], factor: float = 1.0) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (actual[name] - factor * gradient).abs().max() / (factor * gradient).abs().max()
        assert error <= 1e-5, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, {}), (2, {"mode": "isp", "sp": 2, "wp": 2}), (2, {"cp": 2, "cp_comm": "ring"})],
    ids=name_of,
)
def test_packed_sentences_learn_what_each_alone_does(
    ranks: RankPool, folder: Path, world_size: int, layout: dict[str, Any]
) -> None:
    # 5 + 8 + 1 + 2 = 16 tokens: one pack that nothing is cut by, with a sentence that has no label.
    samples = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [18], [19, 20]]
    reference = HfStrategy(settings(folder, "hf"))
    reference.initialize()
    num_labels = sum(len(sample) - 1 for sample in samples)
    total = 0.0
    for sample in samples:
        ids = torch.tensor([sample])
        log_probs = reference.network(input_ids=ids).logits[:, :-1].log_softmax(-1)
        loss = -log_probs.gather(-1, ids[:, 1:, None]).sum() / num_labels
        loss.backward()
        total += float(loss.detach())
    expected = dict(reference.gradients())
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for outcome in ranks.run(one_step, folder, layout, samples, PACK, 1, world_size=world_size):
        assert outcome["metrics"]["loss"] == pytest.approx(total, rel=1e-6)
        assert outcome["metrics"]["tokens"] == num_labels
        assert outcome["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert_same_gradients(outcome["gradients"], expected, factor=min(1.0, 1 / (norm + 1e-6)))  # clipped to 1


def test_micro_num_and_micro_bsz_share_the_work_and_nothing_else(ranks: RankPool, folder: Path) -> None:
    # Sentences of half a seq_len: no pack cuts one, however large it is.
    draw = random.Random(1)
    samples = [[draw.randrange(1, TINY.vocab_size) for _ in range(4)] for _ in range(8)]
    cuts = [
        ({"micro_bsz": 4, "seq_len": 8}, 1),
        ({"micro_bsz": 2, "seq_len": 8}, 2),
        ({"micro_bsz": 1, "seq_len": 8}, 4),
    ]
    first, *others = (ranks.run(one_step, folder, {}, samples, pack, num, world_size=1)[0] for pack, num in cuts)
    for other in others:
        assert other["metrics"]["loss"] == pytest.approx(first["metrics"]["loss"], rel=1e-6)
        assert_same_gradients(other["gradients"], first["gradients"])


def test_the_temperature_of_rollouts_is_not_that_of_labels(ranks: RankPool, folder: Path) -> None:
    plain, hot = (
        ranks.run(one_step, folder, layout, sentences(8), PACK, 2, world_size=1)[0]
        for layout in ({}, {"temperature": 0.5})
    )
    assert hot["metrics"] == plain["metrics"]


def refused_head(folder: Path) -> list[str]:
    config = settings(folder, head="value")
    with parallel_groups(config.parallel) as state:
        strategy = MegatronTrainStrategy(config, state)
        strategy.initialize()
        told = []
        for learn in (strategy.train_tokens, strategy.token_loss):
            with pytest.raises(UserError) as refusal:
                learn([])
            told.append(str(refusal.value))
        return told


def test_a_value_head_learns_no_tokens(ranks: RankPool, folder: Path) -> None:
    (told,) = ranks.run(refused_head, folder, world_size=1)
    assert told == ["a model with head 'value' has no logits, log-probs or entropies; one with head 'lm' has"] * 2


def steps_without_labels(folder: Path, layout: dict[str, Any]) -> list[dict[str, float]]:
    """A step whose second micro-batch has no label, the same without that micro-batch, and a step without any label."""
    with parallel_groups(settings(folder, **dict(layout)).parallel) as state:
        process = processing(state, packed=True)
        dataset = PackedDataset(ListSource(sentences()), **PACK)
        batch, _ = load_batch(PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=2), prefetch=0))
        (first, silent) = load_accum_batches(batch, process)
        silent = silent[0], torch.full_like(silent[1], IGNORED)
        results = []
        for micro_batches in ([first, silent], [first], [silent]):
            strategy = strategy_of(folder, dict(layout), state)
            results.append(strategy.train_tokens(micro_batches))
        return results


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"mode": "isp", "sp": 2, "wp": 2}, {"cp": 2, "cp_comm": "ring"}], ids=name_of
)
def test_micro_batches_and_steps_without_a_label(ranks: RankPool, folder: Path, layout: dict[str, Any]) -> None:
    for with_silent, alone, nothing in ranks.run(steps_without_labels, folder, layout, world_size=2):
        assert with_silent["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert with_silent["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)
        assert nothing.keys() == {"lr", "skipped_steps", "tokens"}, "there is no loss where there is no label"
        assert (nothing["skipped_steps"], nothing["tokens"]) == (1, 0)


def unequal_steps(folder: Path, layout: dict[str, Any]) -> list[Any]:
    """Rank 1 of two data-parallel ranks has no label, then ids outside the vocabulary, then one micro-batch too few."""
    with parallel_groups(settings(folder, **dict(layout)).parallel) as state:
        process = processing(state, packed=True)
        dataset = PackedDataset(ListSource(sentences()), **PACK)
        batch, _ = load_batch(PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=2), prefetch=0))
        first, second = load_accum_batches(batch, process)
        silent = first[0], torch.full_like(first[1], IGNORED)
        outside = first[0], torch.full_like(first[1], TINY.vocab_size)
        other = state.at.dp == 1
        strategy = strategy_of(folder, dict(layout), state)
        results: list[Any] = [strategy.train_tokens([silent if other else first])]
        for wrong in ([outside], []):
            try:
                strategy.train_tokens([*wrong, second] if other else [first, second])
            except ValueError as error:
                results.append(str(error))
        results.append(strategy.train_tokens([first]))
        return results


@pytest.mark.parametrize("layout", [{}, {"mode": "isp", "wp": 2}], ids=name_of)
def test_a_rank_without_labels_and_ranks_that_disagree(ranks: RankPool, folder: Path, layout: dict[str, Any]) -> None:
    ((expected, *_),) = ranks.run(unequal_steps, folder, {}, world_size=1)
    for step, outside, unequal, _ in ranks.run(unequal_steps, folder, layout, world_size=2):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert step["tokens"] == expected["tokens"]
        tokens = PACK["micro_bsz"] * PACK["seq_len"]
        assert outside == f"{tokens} token ids or labels are outside the vocabulary of {TINY.vocab_size}"
        assert unequal == "ranks have different numbers of micro-batches: [2, 1]"
