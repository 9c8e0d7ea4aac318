"""The supervised run that makes the model which a run starts from: found where it has run, or run now.

It is the run that `examples/run_sft.py` makes of the same settings, in the same folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from roll.config import ConfigError, Problem, SFTConfig, load_config
from roll.data.tasks import ReasoningTask, TaskItem
from roll.pipelines.local_ranks import run_on_ranks
from roll.pipelines.rl_config import RLConfig
from roll.pipelines.run_folder import FINAL_MODEL
from roll.pipelines.sft import run_sft
from roll.pipelines.sft_data import SFTData
from roll.pipelines.sft_settings import differences, shaping_settings


def find_model(config: RLConfig) -> Path | None:
    """The folder of the model that the run starts from; None if the warm start has to make it.

    Settings are compared, not the contents of the files that they name.

    Raises ConfigError if the folder of the warm start holds a finished run with other settings.
    """
    warm_start = config.warm_start
    if warm_start is None:
        return config.model_path
    final = warm_start.run_dir / FINAL_MODEL
    if not final.is_dir():
        return None
    found = f"{warm_start.run_dir} holds a run"
    way_out = "remove it, or give warm_start.name another value"
    try:
        made_with = load_config(SFTConfig, warm_start.run_dir / "config.yaml")
    except ConfigError as error:
        raise ConfigError([Problem("warm_start", f"{found} whose config.yaml is of no use: {way_out}")]) from error
    differing = list(differences(shaping_settings(made_with), shaping_settings(warm_start)))
    if differing:
        raise ConfigError([Problem("warm_start", f"{found} with other settings ({'; '.join(differing)}): {way_out}")])
    return final


def make_model(warm_start: SFTConfig, data: SFTData, console: Console) -> Path:
    """Run the warm start on ranks of this machine; the folder of its final model."""
    console.print(f"warm start: making {warm_start.run_dir}")
    run_on_ranks(run_sft, warm_start, data, world_size=warm_start.world_size)
    return warm_start.run_dir / FINAL_MODEL


def learned_items(config: RLConfig, task: ReasoningTask) -> tuple[TaskItem, ...]:
    """The problems whose answers the warm start learns; `task` is that of `config`, not to be made twice."""
    theirs = None if config.warm_start is None else config.warm_start.data.task
    if theirs is None:
        return ()
    return task.train if theirs == config.task else ReasoningTask.of(theirs, "warm_start.data.task").train


def held_out_problems(learned: Sequence[TaskItem], task: ReasoningTask) -> Iterator[Problem]:
    """Answers to held-out problems show nothing if the warm start learns them, in whatever words it asks."""

    def problem(item: TaskItem) -> tuple[str, str | None]:
        return item.entry["question"], item.answer

    known = set(map(problem, learned))
    both = [item.prompt for item in task.eval if problem(item) in known]
    if both:
        found = f"{len(both)} of its held-out problems are learned in the warm start, such as {both[0]!r}"
        yield Problem("task", found)
