"""PPO runs that are over in seconds: overrides of examples/ppo_cpu.yaml, and the process that runs them."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from roll.data.tasks import Entry
from tests.isolation import ROOT
from tests.processes import PATIENCE_S, end

EXAMPLES = ROOT / "examples"
ARCHITECTURE = [
    "hidden_size=32",
    "intermediate_size=64",
    "num_hidden_layers=2",
    "num_attention_heads=4",
    "num_key_value_heads=2",
]
"""Of a model that trains in no time: overrides of `model.config`."""
SMALL = [
    *[f"warm_start.model.config.{setting}" for setting in ARCHITECTURE],
    "task.train_size=64",
    "task.eval_size=16",
    "warm_start.data.task.train_size=64",
    "warm_start.data.task.eval_size=16",
    "warm_start.micro_bsz=4",
    "warm_start.steps=2",
    "steps=2",
    "prompts_per_step=8",
    "responses_per_prompt=2",
    "mini_batch_size=8",
    "algorithm.critic_warmup_steps=0",
    "eval_every=1",
    "actor.optimizer.lr=1e-3",  # Large enough for each step to change the greedy answers,
    "actor.optimizer.warmup_steps=0",  # from the first one on.
    "reward.function=tests.pipelines.small_run:share_of_letters",
]

_calls = itertools.count(1)


def share_of_letters(responses: list[str], entries: list[Entry]) -> list[float]:
    """A reward function whose scores differ between random answers, so that there is something to learn from."""
    return [sum(map(str.isalpha, response)) / max(1, len(response)) for response in responses]


def fails_in_step_three(responses: list[str], entries: list[Entry]) -> list[float]:
    """A reward function that is right for the evaluation before the first step, and for two steps with theirs."""
    call = next(_calls)
    print(f"call {call}", "of a reward function")
    print("to stderr", file=sys.stderr)
    logging.getLogger("my.rewards").warning("logged")
    warnings.warn("a warning", stacklevel=1)
    os.system("echo from a subprocess")
    if call <= 5:
        return share_of_letters(responses, entries)
    print("last words", end="")
    return [1.0]


@contextmanager
def example(
    script: str, *arguments: str, launcher: Sequence[str] = (sys.executable,), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A script of examples/ as a user starts it, in a session of its own. However the block is left, it has ended with
    all that it started.
    """
    packages = filter(None, [environment.pop("PYTHONPATH", ""), os.environ["PYTHONPATH"]])
    process = subprocess.Popen(
        [*launcher, str(EXAMPLES / script), *arguments],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(packages)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


def driver(output_dir: Path, *overrides: str, **environment: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A small PPO run."""
    return example("run_ppo.py", f"output_dir={output_dir}", *SMALL, *overrides, **environment)


def outcome_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """What a process has printed when it has ended."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(output_dir: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A small PPO run from its start to its end."""
    with driver(output_dir, *overrides, **environment) as process:
        return outcome_of(process)
