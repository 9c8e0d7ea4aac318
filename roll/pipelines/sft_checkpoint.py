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
from roll.data import PackBatchSampler, PackedDataset, PackedLoader
from roll.pipelines.records import replace_file
from roll.strategies.base import TrainStrategy


class SFTCheckpoints:
    """The checkpoints of one run. All methods but `newest` are collective over all ranks."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "checkpoints"
        self._newest = self._folder / "newest.json"

    def newest(self) -> dict[str, Any] | None:
        """What newest.json holds; None without a checkpoint."""
        if not self._newest.is_file():
            return None
        state: dict[str, Any] = json.loads(self._newest.read_text())
        return state

    def save(self, step: int, strategy: TrainStrategy, loader: PackedLoader) -> None:
        """Make the checkpoint behind `step` the newest, and the only one."""
        strategy.save_checkpoint(self._of(step))
        content = json.dumps({"step": step, "loader": loader.state_dict()}, indent=2).encode()
        on_rank_0(lambda: self._commit(step, content))

    def load(self, strategy: TrainStrategy, loader: PackedLoader) -> None:
        """Continue from the newest checkpoint, which is there. Raises ValueError if it belongs to other data."""
        state = on_rank_0(self.newest)
        assert state is not None
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


def step_to_resume(config: SFTConfig, dataset: PackedDataset) -> int | None:
    """The step to continue behind; None for a run that starts anew. Nothing is changed by asking.

    Raises:
        ConfigError: there is no checkpoint, it is behind the last step, or it belongs to other data.
    """
    if not config.resume:
        return None
    state = SFTCheckpoints(config.run_dir).newest()
    if state is None:
        raise ConfigError([Problem("resume", f"{config.run_dir} holds no checkpoint")])
    step = int(state["step"])
    if step > config.steps:
        raise ConfigError([Problem("steps", f"{config.steps} is less than the checkpoint's {step}")])
    try:  # A loader of its own, only to be asked.
        PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=1)).load_state_dict(state["loader"])
    except ValueError as error:
        raise ConfigError([Problem("resume", str(error))]) from error
    return step
