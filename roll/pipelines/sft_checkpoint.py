"""The newest state of a supervised run, complete or not there.

    run_dir/checkpoints/
      step_00050/       weights, optimizer and schedule, written by all ranks, readable under any degrees
      newest.json       {"step": 50, "loader": {...}}: which folder counts, and the place in the data behind it

`newest.json` is replaced when the folder is complete, and only then is the older folder deleted: a run that is stopped
at any moment leaves the one or the other checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from roll.checkpoint.folders import on_rank_0
from roll.config import ConfigError, Problem, SFTConfig
from roll.data.packed_loader import PackedLoader
from roll.pipelines.records import replace_file
from roll.strategies.base import TrainStrategy


class SFTCheckpoints:
    """The checkpoints of one run. All methods but `step` are collective over all ranks."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "checkpoints"
        self._newest = self._folder / "newest.json"

    def step(self) -> int | None:
        """The step behind which the newest checkpoint was made; None without one."""
        return int(json.loads(self._newest.read_text())["step"]) if self._newest.is_file() else None

    def save(self, step: int, strategy: TrainStrategy, loader: PackedLoader) -> None:
        """Make the checkpoint behind `step` the newest, and the only one."""
        strategy.save_checkpoint(self._of(step))
        content = json.dumps({"step": step, "loader": loader.state_dict()}, indent=2).encode()
        on_rank_0(lambda: self._commit(step, content))

    def load(self, strategy: TrainStrategy, loader: PackedLoader) -> None:
        """Continue from the newest checkpoint. Raises ValueError if it belongs to other data."""
        state: dict[str, Any] = on_rank_0(lambda: json.loads(self._newest.read_text()))
        loader.load_state_dict(state["loader"])
        strategy.load_checkpoint(self._of(state["step"]))

    def remove(self) -> None:
        """Forget all checkpoints."""
        on_rank_0(lambda: shutil.rmtree(self._folder, ignore_errors=True))

    def _of(self, step: int) -> Path:
        return self._folder / f"step_{step:05d}"

    def _commit(self, step: int, content: bytes) -> None:
        replace_file(self._newest, content)
        for older in self._folder.glob("step_*"):
            if older != self._of(step):
                shutil.rmtree(older)


def step_to_resume(config: SFTConfig) -> int | None:
    """The step to continue behind; None for a run that starts anew.

    Raises:
        ConfigError: there is nothing to resume, or nothing left to do.
    """
    if not config.resume:
        return None
    step = SFTCheckpoints(config.run_dir).step()
    if step is None:
        raise ConfigError([Problem("resume", f"{config.run_dir} holds no checkpoint")])
    if step > config.steps:
        raise ConfigError([Problem("steps", f"{config.steps} is less than the checkpoint's {step}")])
    return step
