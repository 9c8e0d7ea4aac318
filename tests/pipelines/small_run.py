"""PPO runs that are over in seconds: overrides of examples/ppo_cpu.yaml, and the process that runs them."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from roll.data.tasks import Entry, score_responses

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "warm_start.model.config.hidden_size=32",
    "warm_start.model.config.intermediate_size=64",
    "warm_start.model.config.num_hidden_layers=2",
    "warm_start.model.config.num_attention_heads=4",
    "warm_start.model.config.num_key_value_heads=2",
    "task.train_size=64",
    "task.eval_size=16",
    "warm_start.data.task.train_size=64",
    "warm_start.data.task.eval_size=16",
    "warm_start.micro_bsz=4",
    "warm_start.steps=2",
    "ppo.steps=2",
    "ppo.prompts_per_step=8",
    "ppo.responses_per_prompt=2",
    "ppo.mini_batch_size=8",
    "ppo.critic_warmup_steps=0",
    "ppo.eval_every=1",
    "actor.optimizer.lr=1e-3",  # Large enough for each step to change the greedy answers,
    "actor.optimizer.warmup_steps=0",  # from the first one on.
    "reward.function=roll.data.tasks:score_responses",  # Partial scores, so that there is something to learn from.
]

_calls = itertools.count(1)


def fails_in_step_three(responses: list[str], entries: list[Entry]) -> list[float]:
    """A reward function that is right for the evaluation before the first step, and for two steps with theirs."""
    call = next(_calls)
    print(f"call {call}", "of a reward function")
    print("to stderr", file=sys.stderr)
    logging.getLogger("my.rewards").warning("logged")
    warnings.warn("a warning", stacklevel=1)
    os.system("echo from a subprocess")
    if call <= 5:
        return score_responses(responses, entries)
    print("last words", end="")
    return [1.0]


@contextmanager
def driver(output_dir: Path, *overrides: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own. However the block is left, the run and the Ray that it started have ended."""
    paths = [environment.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "examples/run_ppo.py", f"output_dir={output_dir}", *SMALL, *overrides],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str], patience_s: float = 30.0) -> None:
    """Interrupt a process that still runs, and kill it and all that it started if that does not end it."""
    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=patience_s)
    for member in alive:
        member.kill()
    psutil.wait_procs(alive, timeout=patience_s)


def run(output_dir: Path, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run from its start to its end."""
    with driver(output_dir, *overrides, **environment) as process:
        output, errors = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
