"""Whole training loops: data parallel beside sequence parallel, micro-batches, and the example."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from roll.parallel.sequence import (
    Reducer,
    SequenceParallelSampler,
    dispatch_modules,
    get_sequence_parallel_rank,
    pad_for_sequence_parallel,
    reduce_sequence_parallel_loss,
    sequence_parallel_groups,
    shift_labels,
    split_for_sequence_parallel,
)
from tests.isolation import ROOT
from tests.parallel.sequence.one_process import gradients, make_batch, reduced
from tests.parallel.sequence.tiny_models import make_model
from tests.rank_pool import RankPool

EXAMPLE = ROOT / "examples" / "sequence_parallel_hf.py"
MICRO_BATCHES = 2


def rows() -> list[tuple[Tensor, Tensor]]:
    """Eight rows of 31 tokens, whose prompts (without labels) differ in length; two rows are labelled at one end."""
    found = []
    for seed in range(4):
        batch = make_batch("dense", "uneven", seed=seed)
        found += [(batch.tokens[row, :31], batch.labels[row, :31]) for row in range(2)]
    found[3][1][:25] = -100
    found[6][1][6:] = -100
    return found


def step_of_one_process(model: Any, order: list[int], dp: int, global_mean: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients that `dp` unsplit ranks would have: the average over ranks and micro-batches of their means,
    or one mean over all tokens.
    """
    model.zero_grad()
    data = rows()
    shares = [order[rank::dp] for rank in range(dp)]
    batches = [share[start : start + 2] for share in shares for start in range(0, len(share), 2)]
    labels = [torch.stack([data[i][1] for i in batch]) for batch in batches]
    counts = [int((each[:, 1:] != -100).sum()) for each in labels]
    total = 0.0
    for batch, label, count in zip(batches, labels, counts, strict=True):
        mean = model(torch.stack([data[i][0] for i in batch]), labels=label).loss
        loss = mean * count / sum(counts) if global_mean else mean / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model)


def train(reducer: Reducer, global_mean: bool) -> list[str]:
    """One step of two micro-batches of two rows on dp 2 x sp 2, as the document writes a loop; for one mean over all,
    with labels that are shifted before, so that their number is that of the targets.
    """
    wrong = []
    reference_model, model = make_model("qwen3"), make_model("qwen3")
    with sequence_parallel_groups(2):
        data = rows()
        dispatch_modules(model)
        ddp: Any = DistributedDataParallel(model) if reducer == "mean" else model
        sampler = SequenceParallelSampler(data, seed=5)
        loader: DataLoader[Any] = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        micro_batches = []
        for input_ids, labels in loader:
            input_ids, labels, _, _ = pad_for_sequence_parallel(
                input_ids, shift_labels(labels) if global_mean else labels
            )
            micro_batches.append(split_for_sequence_parallel(input_ids, labels)[:2])
        assert len(micro_batches) == MICRO_BATCHES
        settings: dict[str, Any] = {}
        if global_mean:
            total = torch.tensor(sum(int((labels != -100).sum()) for _, labels in micro_batches))
            dist.all_reduce(total)
            settings = {"group": dist.group.WORLD, "total_tokens": total}
        summed = torch.zeros(())
        for input_ids, labels in micro_batches:
            outputs = ddp(input_ids=input_ids, **{"shift_labels" if global_mean else "labels": labels})
            tokens = (labels != -100).sum()
            loss = reduce_sequence_parallel_loss(outputs.loss, tokens, reducer=reducer, **settings)
            if not global_mean:
                loss = loss / MICRO_BATCHES
            loss.backward()
            summed += loss.detach()
        # DistributedDataParallel averages in every backward pass; what is the same on all ranks stays under a mean.
        found = reduced(gradients(model), reducer)
        if not global_mean:
            dist.all_reduce(summed)
            summed /= dist.get_world_size()
            if reducer == "sum":  # of two data-parallel means
                found = {name: value / 2 for name, value in found.items()}
        order = SequenceParallelSampler(data, seed=5)
        order.dp_rank, order.dp_size = 0, 1
        expected_loss, expected = step_of_one_process(reference_model, list(order), 2, global_mean)
        if abs(float(summed) - expected_loss) > 1e-5:
            wrong.append(f"loss {float(summed)} instead of {expected_loss}")
        for name, value in expected.items():
            error = float((found[name] - value).abs().max() / value.abs().max())
            if not error <= 1e-5:
                wrong.append(f"gradient of {name} {error:.1e}")
        assert 0 <= get_sequence_parallel_rank() < 2
    return wrong


@pytest.mark.parametrize("global_mean", [False, True], ids=["mean_of_micro_batches", "one_mean"])
@pytest.mark.parametrize("reducer", ["mean", "sum"])
def test_a_step_of_micro_batches_on_dp_2_sp_2(ranks: RankPool, reducer: Reducer, global_mean: bool) -> None:
    """Under `mean` with torch's DistributedDataParallel. fp32: rounding of sums in another order."""
    assert ranks.run(train, reducer, global_mean, world_size=4) == [[]] * 4


@pytest.mark.slow
def test_the_example_prints_one_loss_twice() -> None:
    """Under torchrun; the last digit may differ by rounding."""
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = [
        (float(whole), float(split))
        for whole, split in re.findall(r"loss ([\d.]+) whole +([\d.]+) over 2 ranks", run.stdout)
    ]
    assert len(losses) == 4
    assert all(abs(whole - split) < 1e-4 for whole, split in losses)
