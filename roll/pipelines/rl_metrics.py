"""Metrics of a step of reinforcement learning, whatever its algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from roll.algorithms import Algorithm, masked_mean
from roll.config import TrainRoleSettings
from roll.errors import UserError
from roll.pipelines.rl_config import RLConfig
from roll.protocol import DataProto
from roll.strategies.progress import end_of_schedule, rate_zero_message

StepMetrics = dict[str, float]


def step_metrics(updates: StepMetrics, batch: DataProto, credit: Mapping[str, float]) -> StepMetrics:
    """Metrics of a step: of its updates, of its responses (`response_metrics`), and of their credit.

    Where updates and responses both have `entropy`, it is the sampling policy's: the updates' is a mean over later
    policies.

    Raises ValueError if updates have another name of the responses' metrics, or credit one of either.
    """
    responses = response_metrics(batch)
    if twice := (updates.keys() & responses.keys()) - {"entropy"}:
        raise UserError(f"a loss has metrics named {', '.join(sorted(twice))}, which the step itself reports")
    metrics = updates | responses
    if twice := metrics.keys() & credit.keys():
        raise UserError(f"credit has metrics named {', '.join(sorted(twice))}, which the step itself reports")
    return metrics | dict(credit)


def response_metrics(batch: DataProto) -> StepMetrics:
    """`reward` (mean score), `exact_match` (of the sampled responses), `response_length` (mean, in tokens).

    And `entropy`, the sampling policy's mean over tokens, if it was looked up.
    """
    mask = batch["response_mask"][:, 1:]
    metrics = {
        "reward": batch["scores"].mean(),
        "exact_match": batch["exact"].mean(),
        "response_length": mask.sum() / len(batch),
    }
    if "entropy" in batch.tensors:
        metrics["entropy"] = masked_mean(batch["entropy"], mask)
    return {name: float(value) for name, value in metrics.items()}


def update_metrics(updates: Mapping[str, Sequence[StepMetrics]]) -> StepMetrics:
    """Means over the optimizer steps of each role, the actor's under plain names, those of others under `role/`.

    A metric's mean is over the steps that have it: a skipped one reports little.

    Raises ValueError if two roles have metrics of one name.
    """
    means: StepMetrics = {}
    for role, steps in updates.items():
        prefix = "" if role == "actor" else f"{role}/"
        for name in dict.fromkeys(name for step in steps for name in step):
            if prefix + name in means:
                raise UserError(f"two roles have a metric named {prefix + name}")
            means[prefix + name] = float(np.mean([step[name] for step in steps if name in step]))
    return means


def rate_zero_notes(config: RLConfig, algorithm: Algorithm) -> Iterator[str]:
    """One sentence for each trained role whose schedule decays to 0 before the run ends."""
    updates_per_step = config.epochs * config.rows_per_step // config.mini_batch_size
    for role in config.model_roles:
        settings = config.model_role(role)
        if not isinstance(settings, TrainRoleSettings):
            continue
        steps = sum(algorithm.trains(role, step) for step in range(1, config.steps + 1))
        end = end_of_schedule(settings.optimizer)
        if end is not None and steps * updates_per_step > end:
            yield f"{role}: {rate_zero_message(settings.optimizer, end)}"
