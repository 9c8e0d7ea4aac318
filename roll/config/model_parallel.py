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
    yield partial(_heads_can_be_exchanged, model, parallel)


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

    yield world_size_fits


def _splits_evenly(model: ModelConfig, parallel: ParallelSettings, degree: str) -> Iterator[Problem]:
    parts = getattr(parallel, degree)
    for size in _sizes(model, degree):
        whole = getattr(model, size)
        if whole % parts:
            given = f"{parts} does not divide the model's {size} {whole}"
            yield Problem(f"parallel.{degree}", f"{given}; {_fitting(model, degree, parts)} would fit")


def _heads_can_be_exchanged(model: ModelConfig, parallel: ParallelSettings) -> Iterator[Problem]:
    """Whether each of the ranks that exchange heads gets equally many of its tensor-parallel rank's query heads, and
    whole key-value heads, or several ranks the same one.
    """
    ranks, tp = parallel.context_parallel, parallel.tp
    if parallel.zigzag or model.num_attention_heads % tp or model.num_key_value_heads % tp:
        return  # No heads are exchanged, or `tp` is the problem.
    name = "sp" if parallel.mode == "isp" else "cp"
    heads, shared = model.num_attention_heads // tp, model.num_key_value_heads // tp
    others = "" if name == "sp" else ", or cp_comm all_gather or ring"
    each = f" / tp {tp}" if tp > 1 else ""
    fitting = max(n for n in range(1, ranks + 1) if heads % n == 0 and _shareable(shared, n))
    if heads % ranks:
        given = f"{ranks} does not divide the model's num_attention_heads {model.num_attention_heads}{each}"
        yield Problem(f"parallel.{name}", f"{given}; {fitting} would fit{others}")
    if not _shareable(shared, ranks):
        given = f"{ranks} neither divides the model's num_key_value_heads {model.num_key_value_heads}{each}"
        yield Problem(f"parallel.{name}", f"{given} nor is a multiple of it; {fitting} would fit{others}")


def _sizes(model: ModelConfig, degree: str) -> tuple[str, ...]:
    # Norms of a head's queries and keys are as long as the head.
    return (*SPLIT_SIZES[degree], "head_dim") if degree == "wp" and model.qk_norm else SPLIT_SIZES[degree]


def _fitting(model: ModelConfig, degree: str, limit: int) -> int:
    """The largest degree up to `limit` that every size allows."""
    wholes = [getattr(model, size) for size in _sizes(model, degree)]
    return max(parts for parts in range(1, limit + 1) if all(whole % parts == 0 for whole in wholes))


def _shareable(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0
