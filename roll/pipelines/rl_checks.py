"""Checks of a run's settings across its sections.

Each check compares a few settings and names them with their values. A check is skipped if one of its settings is
unusable in itself (see `run_checks`), so checks are kept small and there is one per role rather than a loop inside.

Rows need not divide over the ranks of a role: the planner deals any number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from roll.config.model import ModelConfig
from roll.config.model_parallel import model_split_checks, world_size_checks
from roll.config.model_source import architecture_in, architecture_of, folder_problems
from roll.config.problems import Check, ConfigError, Problem, UnavailableError, run_checks
from roll.config.roles import ModelRoleSettings

if TYPE_CHECKING:
    from roll.pipelines.rl_config import ModelRole, RLConfig


def rl_checks(config: RLConfig) -> Iterator[Check]:
    """All checks across the sections of `config`."""
    yield partial(_one_model, config)
    yield partial(_model_folder_is_usable, config)
    yield partial(_code_is_of_a_folder, config)
    yield partial(_family_is_of_a_folder, config)
    yield partial(_warm_start_has_another_name, config)
    yield partial(_warm_start_does_not_resume, config)
    yield partial(_roles_have_settings, config)
    for role in ("actor", "critic", "reference"):
        yield partial(_model_fits_ranks, config, role)
        yield partial(_degrees_fit_world_size, config, role)
        yield partial(_row_fits_budget, config, role)
    yield partial(_sequence_fits_context, config)
    yield partial(_prompts_suffice, config)
    yield partial(_rows_make_mini_batches, config)
    yield partial(_algorithm_fits_the_loop, config)


def _role(config: RLConfig, role: ModelRole) -> ModelRoleSettings:
    """Settings of a role that is started. Raises UnavailableError for another, which no check is about."""
    if role != "actor" and role not in config.model_roles:
        raise UnavailableError(f"{role} is not started")
    try:
        return config.model_role(role)
    except ConfigError as error:
        raise UnavailableError(f"{role} has no settings") from error


def _roles_have_settings(config: RLConfig) -> Iterator[Problem]:
    for role in config.model_roles:
        try:
            config.model_role(role)
        except ConfigError as error:
            yield from error.problems


def _one_model(config: RLConfig) -> Iterator[Problem]:
    if (config.model_path is None) == (config.warm_start is None):
        given = "neither" if config.model_path is None else f"model_path {str(config.model_path)!r} and a warm_start"
        yield Problem(
            "model_path", f"exactly one of model_path and warm_start must be set, the other null; got {given}"
        )


def _model_folder_is_usable(config: RLConfig) -> Iterator[Problem]:
    if config.model_path is not None and config.warm_start is None:
        yield from folder_problems("model_path", config.model_path, config.family)


def _code_is_of_a_folder(config: RLConfig) -> Iterator[Problem]:
    if config.trust_remote_code and config.warm_start is not None:
        yield Problem(
            "trust_remote_code", "must be false with a warm_start; warm_start.model.trust_remote_code is its own"
        )


def _family_is_of_a_folder(config: RLConfig) -> Iterator[Problem]:
    if config.family is not None and config.warm_start is not None:
        yield Problem(
            "family", f"must be null with a warm_start, got {config.family!r}; warm_start.model.family is its own"
        )


def _warm_start_has_another_name(config: RLConfig) -> Iterator[Problem]:
    if config.warm_start is not None and config.warm_start.run_dir.resolve() == config.run_dir.resolve():
        yield Problem("warm_start.name", f"must not be the name of this run, whose folder is {config.run_dir}")


def _warm_start_does_not_resume(config: RLConfig) -> Iterator[Problem]:
    if config.warm_start is not None and config.warm_start.resume:
        yield Problem("warm_start.resume", "must be false: a warm start that has not ended is run anew")


def _architecture(config: RLConfig) -> ModelConfig:
    if config.warm_start is not None:
        return architecture_of(config.warm_start.model)
    if config.model_path is None:
        raise UnavailableError("there is no model")
    return architecture_in(config.model_path, config.family)


def _model_fits_ranks(config: RLConfig, role: ModelRole) -> Iterator[Problem]:
    checks = model_split_checks(_architecture(config), _role(config, role).parallel)
    yield from _under(config, role, checks)


def _degrees_fit_world_size(config: RLConfig, role: ModelRole) -> Iterator[Problem]:
    settings = _role(config, role)
    checks = world_size_checks(settings.parallel, settings.world_size)
    yield from _under(config, role, checks)


def _under(config: RLConfig, role: ModelRole, checks: Iterator[Check]) -> Iterator[Problem]:
    return (problem.under(config.path_of(role)) for problem in run_checks(checks))


def _row_fits_budget(config: RLConfig, role: ModelRole) -> Iterator[Problem]:
    budget = _role(config, role).micro_batch.max_tokens
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    if budget is not None and budget < longest:
        yield Problem(
            f"{config.path_of(role)}.micro_batch.max_tokens", f"{budget} is less than one row, {_longest_row(config)}"
        )


def _sequence_fits_context(config: RLConfig) -> Iterator[Problem]:
    model = _architecture(config)
    context = model.context_length
    if config.task.max_prompt_tokens + config.rollout.max_new_tokens > context:
        longest = _longest_row(config)
        limit = f"max_position_embeddings {model.max_position_embeddings}"
        if context != model.max_position_embeddings:
            limit = f"context of {context} tokens ({limit}, scaled by rope_scaling.factor)"
        yield Problem("task.max_prompt_tokens", f"{longest}, exceeds the model's {limit}")


def _longest_row(config: RLConfig) -> str:
    prompt, response = config.task.max_prompt_tokens, config.rollout.max_new_tokens
    return f"task.max_prompt_tokens {prompt} + rollout.max_new_tokens {response} = {prompt + response}"


def _prompts_suffice(config: RLConfig) -> Iterator[Problem]:
    if config.task.train_size < config.prompts_per_step:
        prompts = f"{config.task.train_size} is less than prompts_per_step {config.prompts_per_step}"
        yield Problem("task.train_size", prompts)


def _rows_make_mini_batches(config: RLConfig) -> Iterator[Problem]:
    if config.rows_per_step % config.mini_batch_size:
        yield Problem("mini_batch_size", f"{config.mini_batch_size} does not divide {config.rows_text}")


def _algorithm_fits_the_loop(config: RLConfig) -> Iterator[Problem]:
    yield from run_checks(config.algorithm.checks_in(config))
