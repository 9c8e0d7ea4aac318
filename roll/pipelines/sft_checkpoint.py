"""The newest state of a supervised run, complete or not there.

    run_dir/checkpoints/
      step_00050/       weights, optimizer and schedule, written by all ranks, readable under any degrees
      newest.json       {"step": 50, "loader": {...}, "settings": {...}}: which folder counts, the place in the data
                        behind it, and the settings that have shaped the model so far

`newest.json` is replaced when the folder is complete, and only then is the older folder deleted: a run that is stopped
at any moment leaves the one or the other checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.checkpoint.folders import on_rank_0
from roll.config import ConfigError, Problem, SFTConfig
from roll.data import PackBatchSampler, PackedDataset, PackedLoader
from roll.errors import UserError
from roll.pipelines.records import replace_file
from roll.pipelines.sft_settings import differences, shaping_settings
from roll.strategies.base import TrainStrategy

MAY_CHANGE = frozenset({"steps", "world_size", "parallel", "micro_num", "optimizer"})
"""Settings that may be others after a checkpoint than before it. The strategy names what changed in `optimizer`: a run
whose schedule has ended is extended with a larger `optimizer.total_steps`."""


class SFTCheckpoints:
    """The checkpoints of one run. All methods but `newest` are collective over all ranks."""

    def __init__(self, config: SFTConfig) -> None:
        self._config = config
        self._folder = config.run_dir / "checkpoints"
        self._newest = self._folder / "newest.json"

    def newest(self) -> dict[str, Any] | None:
        """What newest.json holds; None without a checkpoint. Raises ValueError if it is damaged."""
        if not self._newest.is_file():
            return None
        try:
            state: dict[str, Any] = json.loads(self._newest.read_text())
        except ValueError as error:
            raise UserError(f"{self._newest} is damaged: {error}") from error
        if not self._of(state["step"]).is_dir():
            raise UserError(f"{self._newest} names step {state['step']}, of which there is no folder")
        return state

    def save(self, step: int, strategy: TrainStrategy, loader: PackedLoader) -> None:
        """Make the checkpoint behind `step` the newest, and the only one."""
        strategy.save_checkpoint(self._of(step))
        state = {"step": step, "loader": loader.state_dict(), "settings": _settings(self._config)}
        content = json.dumps(state, indent=2).encode()
        on_rank_0(lambda: self._commit(step, content))

    def load(self, strategy: TrainStrategy, loader: PackedLoader) -> None:
        """Continue from the newest checkpoint, which is there. Raises ValueError if it belongs to other data."""
        state = on_rank_0(self.newest)
        assert state is not None
        loader.load_state_dict(state["loader"])
        strategy.load_checkpoint(self._of(state["step"]))

    def remove(self) -> None:
        """Forget all checkpoints."""
        on_rank_0(self._remove)

    def _remove(self) -> None:
        self._newest.unlink(missing_ok=True)  # First, so that it never names what is gone.
        shutil.rmtree(self._folder, ignore_errors=True)

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
        ConfigError: there is no usable checkpoint, it is behind the last step, or it belongs to other data or settings.
    """
    if not config.resume:
        return None
    try:
        state = SFTCheckpoints(config).newest()
    except ValueError as error:
        raise ConfigError([Problem("resume", str(error))]) from error
    if state is None:
        raise ConfigError([Problem("resume", f"{config.run_dir} holds no checkpoint")])
    step = int(state["step"])
    if step > config.steps:
        raise ConfigError([Problem("steps", f"{config.steps} is less than the checkpoint's {step}")])
    # Earlier versions kept more of them. The strategy refuses their checkpoints, and says that they are old.
    differing = list(differences(_kept(state["settings"]), _settings(config)))
    if differing:
        raise ConfigError([Problem("resume", f"the checkpoint has other settings: {'; '.join(differing)}")])
    try:  # A loader of its own, only to be asked.
        PackedLoader(dataset, PackBatchSampler(len(dataset), micro_num=1)).load_state_dict(state["loader"])
    except ValueError as error:
        raise ConfigError([Problem("resume", str(error))]) from error
    return step


def _settings(config: SFTConfig) -> dict[str, Any]:
    return _kept(shaping_settings(config))


def _kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that have to be the same after a checkpoint."""
    return {name: value for name, value in settings.items() if name not in MAY_CHANGE}
