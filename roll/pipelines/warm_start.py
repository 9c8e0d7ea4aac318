"""The supervised run that makes the model which PPO starts from: found where it has run, or run now.

It is the run that `examples/run_sft.py` makes of the same settings, in the same folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.config import ConfigError, PPOConfig, Problem, SFTConfig, load_config
from roll.data.tasks import ReasoningTask
from roll.pipelines.local_ranks import run_on_ranks
from roll.pipelines.sft import FINAL_MODEL, run_sft
from roll.pipelines.sft_data import SFTData

NOT_OF_THE_MODEL = frozenset({"output_dir", "eval_every", "save_every", "resume", "process_group_timeout_s"})
"""Settings of a supervised run that its final model does not depend on."""


def find_model(config: PPOConfig) -> Path | None:
    """The folder of the model that the run starts from; None if the warm start has to make it.

    Raises ConfigError if the folder of the warm start holds a finished run with other settings.
    """
    warm_start = config.warm_start
    if warm_start is None:
        return config.model_path
    final = warm_start.run_dir / FINAL_MODEL
    if not final.is_dir():
        return None
    made_with = load_config(SFTConfig, warm_start.run_dir / "config.yaml")
    differing = list(_differences(_shaping(made_with), _shaping(warm_start)))
    if differing:
        text = f"{warm_start.run_dir} holds a run with other settings ({'; '.join(differing)})"
        raise ConfigError([Problem("warm_start", f"{text}; remove it, or give warm_start.name another value")])
    return final


def make_model(warm_start: SFTConfig, data: SFTData, console: Console) -> Path:
    """Run the warm start on ranks of this machine; the folder of its final model."""
    console.print(f"warm start: making {warm_start.run_dir}")
    run_on_ranks(run_sft, warm_start.model_copy(update={"resume": False}), data, world_size=warm_start.world_size)
    return warm_start.run_dir / FINAL_MODEL


def held_out_problems(config: PPOConfig, task: ReasoningTask) -> Iterator[Problem]:
    """Answers to held-out problems show nothing if the warm start learns them."""
    theirs = None if config.warm_start is None else config.warm_start.data.task
    if theirs is None or theirs == config.task:
        return
    learned = {item.prompt for item in ReasoningTask.of(theirs).train}
    both = [item.prompt for item in task.eval if item.prompt in learned]
    if both:
        yield Problem(
            "task", f"{len(both)} of its held-out problems are learned in the warm start, such as {both[0]!r}"
        )


def _shaping(config: SFTConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=set(NOT_OF_THE_MODEL))


def _differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Each setting that differs, with its values there and here."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in dict.fromkeys([*theirs, *ours]):
            yield from _differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else name)
    elif theirs != ours:
        yield f"{path} {theirs!r} there, {ours!r} here"
