"""Makers and readers of the fields of a batch, matched before any process starts.

A run without a field that its algorithm reads would fail only after its first batch has been sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType

from roll.algorithms.algorithm import Algorithm
from roll.algorithms.loss_term import TOKENS, LossTerm
from roll.algorithms.registry import make_algorithm
from roll.config import ConfigError, Problem, TrainRoleSettings
from roll.generation.records import LOG_PROBS
from roll.generation.registry import find_engine
from roll.pipelines.rl_config import MODEL_ROLES, RLConfig

OBJECTS = frozenset({"prompt", "entry", "response", "stop"})
"""Fields with one Python object per row, which credit may read; all others are tensors."""

MADE_BY: Mapping[str, Set[str]] = MappingProxyType(
    {
        "rollout": frozenset({*TOKENS, "prompt", "entry", "stop"}),
        "reward": frozenset({"scores", "exact", "response"}),
        "loop": frozenset({"group"}),
        "actor": frozenset({"log_probs", "entropy"}),
        "reference": frozenset({"ref_log_probs"}),
        "critic": frozenset({"values"}),
    }
)
"""Fields of a batch before credit is assigned, and who makes them. The loop numbers the prompts of a step: `group`,
`[B]` int64, is equal for the responses to one prompt."""

ENGINE_MAKES = frozenset({LOG_PROBS})
"""Fields that some engines provide (`Generator.provides`)."""


def check_data_flow(config: RLConfig) -> None:
    """Refuse an algorithm whose fields or roles do not fit the run.

    Raises ConfigError: it reads what nothing in the run makes (with the field, who reads it and what would make it),
    its credit replaces the tokens, a loss reads objects or has no terms, or the role that it trains is not started or
    has no optimizer.
    """
    problems = list(_problems(config, make_algorithm(config.algorithm)))
    if problems:
        raise ConfigError(problems)


def fields_of(terms: Sequence[LossTerm]) -> list[str]:
    """All that a loss of these terms reads of a batch, and so all that is sent for it."""
    return sorted({*TOKENS}.union(*(term.reads for term in terms)))


def _problems(config: RLConfig, algorithm: Algorithm) -> Iterator[Problem]:
    name = config.algorithm.name
    for role in sorted(algorithm.roles - set(MODEL_ROLES)):
        yield Problem("algorithm.name", f"{name} needs a role {role!r}; a run has {', '.join(MODEL_ROLES)}")
    provides = find_engine(config.rollout.engine.name).provides
    for field in sorted(provides - ENGINE_MAKES):
        message = f"{config.rollout.engine.name} provides {field!r}; a response has {', '.join(sorted(ENGINE_MAKES))}"
        yield Problem("rollout.engine.name", message)
    makers = {"rollout", "reward", "loop", *config.model_roles}
    there = provides.union(*(MADE_BY[maker] for maker in makers))
    for field in sorted(algorithm.makes & {*TOKENS}):
        yield Problem("algorithm.name", f"{name}'s credit makes {field!r}, which the role rollout makes")
    losses = algorithm.losses()
    if not _are_losses(losses):
        text = f"{name}'s losses must give a list of LossTerm for each role, got {losses!r}"
        yield Problem("algorithm.name", text)
        return
    if not losses:
        yield Problem("algorithm.name", f"{name}'s losses train no role")
    readers: list[tuple[str, Set[str]]] = [("credit", algorithm.reads - there)]
    for role, terms in losses.items():
        reader, fields = f"loss of {role}", frozenset(fields_of(terms))
        if role not in config.model_roles:
            yield Problem("algorithm.name", f"{name} trains {role!r}, which is not a trained role that it needs")
        elif not isinstance(config.model_role(role), TrainRoleSettings):
            yield Problem("algorithm.name", f"{name} trains {role!r}, whose settings have no optimizer")
        if not terms:
            yield Problem("algorithm.name", f"{name}'s {reader} has no terms")
        for field in sorted(fields & OBJECTS):
            text = f"{name}'s {reader} reads {field!r}, which is no tensor; a loss is sent tensors only"
            yield Problem("algorithm.name", text)
        readers.append((reader, fields - there - algorithm.makes))
    for reader, missing in readers:
        for field in sorted(missing):
            yield Problem("algorithm.name", f"{name}'s {reader} reads {field!r}, {_maker(field, config)}")


def _are_losses(losses: object) -> bool:
    return isinstance(losses, Mapping) and all(
        isinstance(terms, Sequence) and all(isinstance(term, LossTerm) for term in terms) for terms in losses.values()
    )


def _maker(field: str, config: RLConfig) -> str:
    """The maker that a missing field would have."""
    for maker, fields in MADE_BY.items():
        if field in fields:
            return f"which the role {maker} makes, and {config.algorithm.name} does not name this role"
    if field in ENGINE_MAKES:
        return f"which rollout.engine {config.rollout.engine.name!r} does not provide"
    return "which neither a role nor its credit makes"
