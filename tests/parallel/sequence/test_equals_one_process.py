"""Every kind of model, input, window and labelling: logits and gradients of one process, on every rank.

A job runs many cases, since starting one costs more than the case; what comes back is the name of each that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roll.parallel.sequence import sequence_parallel_groups
from tests.parallel.sequence.one_process import Batch, How, differences, exact_loss, make_batch
from tests.parallel.sequence.tiny_models import FAMILIES, make_exact, make_model
from tests.rank_pool import RankPool

# Query and key-value heads. Nine heads divide by neither 2 nor 4; six kv heads on 4 ranks are needed twice each.
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1), "gqa_6_of_12": (12, 6), "indivisible": (9, 3)}
# Of 32 tokens: parts have 8 or 16.
WINDOWS = {"no_window": None, "within_a_part": 3, "over_parts": 20}
INPUTS = ("dense", "padded", "packed")
LABELLED = ("uneven", "one_rank", "none")

# fp32: errors of rounding, relative to the largest logit and to the largest gradient of a weight.
FP32: dict[str, Any] = {"logits": 1e-6, "gradient": 1e-5}
FP64: dict[str, Any] = {"logits": 1e-10, "gradient": 1e-10}


def named(inputs: tuple[str, ...], labelled: tuple[str, ...]) -> dict[str, Batch]:
    return {f"{kind}-{labels}": make_batch(kind, labels) for kind, labels in product(inputs, labelled)}


def failures_of_heads() -> dict[str, dict[str, list[str]]]:
    """Cases in which this rank differs from one process."""
    failed = {}
    batches = named(INPUTS, LABELLED) | named(("left_padded", "cu_seqlens"), ("uneven",))
    with sequence_parallel_groups(dist.get_world_size()):
        for head, window in product(HEADS, WINDOWS):
            if head == "gqa_6_of_12" and window != "over_parts":
                continue  # what it adds, the copies of kv heads, has nothing to do with windows
            query, key_value = HEADS[head]
            model = make_model(
                "mistral", num_attention_heads=query, num_key_value_heads=key_value, sliding_window=WINDOWS[window]
            )
            failed[f"{head}-{window}"] = differences(model, batches, **FP32)
    return {name: wrong for name, wrong in failed.items() if wrong}


def failures_of_families() -> dict[str, dict[str, list[str]]]:
    batches = named(("padded", "packed"), ("uneven",))
    with sequence_parallel_groups(dist.get_world_size()):
        failed = {
            family: differences(make_model(family), batches, hows=("shifted", "labels"), **FP32) for family in FAMILIES
        }
    return {name: wrong for name, wrong in failed.items() if wrong}


def failures_in_fp64() -> dict[str, dict[str, list[str]]]:
    failed = {}
    batches = named(("dense", "packed"), ("uneven",))
    with sequence_parallel_groups(dist.get_world_size()):
        for (head, (query, key_value)), window in product(HEADS.items(), (None, 5)):
            model = make_model(
                "mistral",
                num_attention_heads=query,
                num_key_value_heads=key_value,
                sliding_window=window,
                dtype=torch.float64,
            )
            model.loss_function = exact_loss  # transformers' own is in fp32
            hows: tuple[How, ...] = ("labels",) if window else ("shifted",)
            failed[f"{head}-{window}"] = differences(make_exact(model), batches, **FP64, reducer="sum", hows=hows)
    return {name: wrong for name, wrong in failed.items() if wrong}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("job", [failures_of_heads, failures_of_families, failures_in_fp64])
def test_results_of_one_process(ranks: RankPool, job: Callable[[], Any], size: int) -> None:
    failed = ranks.run(job, world_size=size)
    assert {f"rank {rank}": wrong for rank, wrong in enumerate(failed) if wrong} == {}
