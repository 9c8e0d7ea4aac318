"""From whom each field of a batch comes, checked before any process starts.

A run without a field that its algorithm reads would fail only after its first batch has been sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from types import MappingProxyType

from roll.algorithms.algorithm import Algorithm
from roll.algorithms.loss_term import LossTerm
from roll.algorithms.registry import make_algorithm
from roll.config import ConfigError, Problem
from roll.generation.records import LOG_PROBS
from roll.generation.registry import find_engine
from roll.pipelines.rl_config import MODEL_ROLES, RLConfig

TOKENS = frozenset({"input_ids", "attention_mask", "response_mask"})
"""Fields that every loss is given."""

MADE_BY: Mapping[str, Set[str]] = MappingProxyType(
    {
        "rollout": TOKENS | {"prompt", "entry", "stop"},
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
    """Raise ConfigError where the algorithm reads what nothing in the run makes, or trains a role that it does not
    name: with the field, who reads it and what would make it.
    """
    problems = list(_problems(config, make_algorithm(config.algorithm)))
    if problems:
        raise ConfigError(problems)


def fields_of(terms: Sequence[LossTerm]) -> list[str]:
    """All that a loss of these terms reads of a batch, and so all that is sent for it."""
    return sorted(TOKENS.union(*(term.reads for term in terms)))


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
    readers: list[tuple[str, Set[str]]] = [("credit", algorithm.reads - there)]
    for role, terms in algorithm.losses().items():
        if role not in config.model_roles or role == "reference":
            yield Problem("algorithm.name", f"{name} trains {role!r}, which is not a trained role that it needs")
        readers.append((f"loss of {role}", frozenset(fields_of(terms)) - there - algorithm.makes))
    for reader, missing in readers:
        for field in sorted(missing):
            yield Problem("algorithm.name", f"{name}'s {reader} reads {field!r}, {_maker(field, config)}")


def _maker(field: str, config: RLConfig) -> str:
    """What would make a field that is not there."""
    for maker, fields in MADE_BY.items():
        if field in fields:
            return f"which the role {maker} makes, and {config.algorithm.name} does not name this role"
    if field in ENGINE_MAKES:
        return f"which rollout.engine {config.rollout.engine.name!r} does not provide"
    return "which neither a role nor its credit makes"
