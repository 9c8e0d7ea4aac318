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
    for degree, sizes in SPLIT_SIZES.items():
        for size in sizes:
            yield partial(_splits_evenly, model, size, parallel, degree)
    if model.qk_norm:
        yield partial(_splits_evenly, model, "head_dim", parallel, "wp")
    yield partial(_key_value_heads_can_be_shared, model, parallel)


def world_size_checks(parallel: ParallelSettings, world_size: int) -> Iterator[Check]:
    """Checks of the degrees among themselves. Paths of problems start at the section that holds `parallel`."""

    def world_size_fits() -> Iterator[Problem]:
        if world_size % parallel.model_parallel_size:
            degrees = f"parallel.{parallel.describe()}"
            yield Problem("world_size", f"{world_size} is not a multiple of {degrees} = {parallel.model_parallel_size}")
        elif world_size // parallel.pp % parallel.wp:
            stage = f"{world_size} ranks / pp {parallel.pp} = {world_size // parallel.pp}"
            yield Problem("parallel.wp", f"{parallel.wp} does not divide the ranks of a stage, {stage}")

    def context_parallel_is_one() -> Iterator[Problem]:
        if parallel.cp > 1:
            yield Problem("parallel.cp", f"context parallelism is not available yet: cp must be 1, got {parallel.cp}")

    yield world_size_fits
    yield context_parallel_is_one


def _splits_evenly(model: ModelConfig, size: str, parallel: ParallelSettings, degree: str) -> Iterator[Problem]:
    whole, parts = getattr(model, size), getattr(parallel, degree)
    if whole % parts:
        fitting = max(part for part in range(1, parts) if whole % part == 0)
        yield Problem(f"parallel.{degree}", f"{parts} does not divide the model's {size} {whole}; {fitting} would fit")


def _key_value_heads_can_be_shared(model: ModelConfig, parallel: ParallelSettings) -> Iterator[Problem]:
    """The head exchange of isp gives each rank whole key-value heads, or several ranks the same one."""
    heads, sp = model.num_key_value_heads, parallel.sp
    if heads % sp and sp % heads:
        fitting = max(part for part in range(1, sp) if heads % part == 0 or part % heads == 0)
        yield Problem(
            "parallel.sp",
            f"{sp} neither divides the model's num_key_value_heads {heads} nor is a multiple of it; "
            f"{fitting} would fit",
        )
