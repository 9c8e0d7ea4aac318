"""Whether a model can be split as its settings ask: every check that needs both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from roll.config.model import ModelConfig
from roll.config.parallel import ParallelSettings
from roll.config.problems import Check, Problem, run_checks

# Sizes that must be a multiple of a degree, because each rank (or stage) takes an equal part of them.
SPLIT_SIZES = {
    "tp": ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"),
    "sp": ("num_attention_heads",),
    "wp": ("hidden_size", "intermediate_size", "vocab_size", "query_key_value_size"),
    "pp": ("num_hidden_layers",),
}


def check_parallel(model: ModelConfig, parallel: ParallelSettings, world_size: int, role: str = "") -> list[str]:
    """Whether `world_size` ranks can hold `model` under `parallel`: one line per problem, none if they can.

    Lines read `actor.parallel.tp: ...` for role `actor`, and `parallel.tp: ...` without one.
    """
    checks = (*model_split_checks(model, parallel), *world_size_checks(parallel, world_size))
    return [str(problem.under(role)) for problem in run_checks(checks)]


def model_split_checks(model: ModelConfig, parallel: ParallelSettings) -> Iterator[Check]:
    """Checks of `model` against the degrees. Paths of problems start at the section that holds `parallel`."""
    for degree in SPLIT_SIZES:
        yield partial(_splits_evenly, model, parallel, degree)
    yield partial(_key_value_heads_can_be_shared, model, parallel)


def world_size_checks(parallel: ParallelSettings, world_size: int) -> Iterator[Check]:
    """Checks of the degrees among themselves. Paths of problems start at the section that holds `parallel`."""

    def world_size_fits() -> Iterator[Problem]:
        if world_size % parallel.model_parallel_size:
            degrees = f"parallel.{parallel.describe()}"
            yield Problem("world_size", f"{world_size} is not a multiple of {degrees} = {parallel.model_parallel_size}")
        elif world_size // parallel.pp % parallel.wp:
            ranks = world_size // parallel.pp
            fitting = max(wp for wp in range(1, parallel.wp) if ranks % wp == 0)
            stage = f"the ranks of a stage, {world_size} ranks / pp {parallel.pp} = {ranks}"
            yield Problem("parallel.wp", f"{parallel.wp} does not divide {stage}; {fitting} would fit")

    def context_parallel_is_one() -> Iterator[Problem]:
        if parallel.cp > 1:
            yield Problem("parallel.cp", f"context parallelism is not available yet: cp must be 1, got {parallel.cp}")

    yield world_size_fits
    yield context_parallel_is_one


def _splits_evenly(model: ModelConfig, parallel: ParallelSettings, degree: str) -> Iterator[Problem]:
    parts = getattr(parallel, degree)
    for size in _sizes(model, degree):
        whole = getattr(model, size)
        if whole % parts:
            given = f"{parts} does not divide the model's {size} {whole}"
            yield Problem(f"parallel.{degree}", f"{given}; {_fitting(model, degree, parts)} would fit")


def _key_value_heads_can_be_shared(model: ModelConfig, parallel: ParallelSettings) -> Iterator[Problem]:
    """The head exchange of isp gives each rank whole key-value heads, or several ranks the same one."""
    heads, sp = model.num_key_value_heads, parallel.sp
    if not _shareable(heads, sp):
        given = f"{sp} neither divides the model's num_key_value_heads {heads} nor is a multiple of it"
        yield Problem("parallel.sp", f"{given}; {_fitting(model, 'sp', sp)} would fit")


def _sizes(model: ModelConfig, degree: str) -> tuple[str, ...]:
    # Norms of a head's queries and keys are as long as the head.
    return (*SPLIT_SIZES[degree], "head_dim") if degree == "wp" and model.qk_norm else SPLIT_SIZES[degree]


def _fitting(model: ModelConfig, degree: str, limit: int) -> int:
    """The largest degree up to `limit` that every size allows."""
    wholes = [getattr(model, size) for size in _sizes(model, degree)]
    return max(
        parts
        for parts in range(1, limit + 1)
        if all(whole % parts == 0 for whole in wholes)
        and (degree != "sp" or _shareable(model.num_key_value_heads, parts))
    )


def _shareable(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0
