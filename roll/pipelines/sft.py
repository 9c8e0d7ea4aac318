"""Supervised training on packed data: every rank of a run calls `run_sft`, and one of them shows how it goes.

No Ray is needed: the ranks are what torchrun starts, or `roll.pipelines.local_ranks`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from roll.checkpoint.folders import on_rank_0
from roll.config import ConfigError, Problem, SFTConfig, dump_config
from roll.data import (
    PackBatchSampler,
    PackedDataset,
    PackedLoader,
    RampUp,
    data_process,
    load_accum_batches,
    load_batch,
)
from roll.parallel.state import ParallelState, parallel_groups
from roll.pipelines.model_start import write_untrained_model
from roll.pipelines.plot import LOSS_PICTURE
from roll.pipelines.run_folder import FINAL_MODEL
from roll.pipelines.sft_checkpoint import SFTCheckpoints, step_to_resume
from roll.pipelines.sft_data import SFTData
from roll.pipelines.tracker import EVALUATION, RunTracker
from roll.strategies import MegatronTrainStrategy
from roll.strategies.tokens import TokenMicroBatch

UNTRAINED_MODEL = "untrained"
"""The folder of a run that holds the architecture and the tokenizer of a model that starts from random weights."""
SHOWN_METRICS = ("loss", "eval/loss", "grad_norm", "lr", "real_tokens")


class Unseen:
    """What a rank that reports nothing has in the place of a tracker."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Nothing is counted."""
        yield

    def log(self, step: int, metrics: Mapping[str, Any], *, tokens: int | None = None) -> None:
        """Nothing is written."""

    def note(self, text: str) -> None:
        """Nothing is shown."""


def run_sft(config: SFTConfig, data: SFTData, console: Console | None = None) -> None:
    """Train as configured, as one rank of `config.world_size`; `config.run_dir` holds the outcome.

    Args:
        data: from `load_sft_data(config)`, which finds what is wrong before anything is started.

    What an earlier run of the same name has left is kept until this one has its model, and its first batch or the
    checkpoint.

    Raises:
        ValueError: the launcher has started another number of ranks, or it cannot be resumed as `step_to_resume`
            says; on every rank alike.
    """
    check_ranks(config)
    resume_after = step_to_resume(config, data.train)
    with ExitStack() as cleanup:
        state = cleanup.enter_context(parallel_groups(config.parallel, timeout_s=config.process_group_timeout_s))
        checkpoints = SFTCheckpoints(config)
        run = SFTRun(config, data, state, checkpoints)
        cleanup.callback(run.loader.close)
        run.prepare(resume_after)
        dist.barrier()  # All ranks have come this far, or nothing is removed.
        if resume_after is None:
            checkpoints.remove()
        # Where there is a final model, it is that of the settings beside it.
        on_rank_0(lambda: _remove_whole(config.run_dir / FINAL_MODEL))
        tracker: RunTracker | Unseen = Unseen()
        if state.rank == state.degrees.reporters[0]:
            tracker = cleanup.enter_context(
                RunTracker(
                    config.run_dir,
                    config_yaml=dump_config(config),
                    total_steps=config.steps,
                    title=f"SFT {config.name}",
                    shown=SHOWN_METRICS,
                    picture=LOSS_PICTURE,
                    resume_after=resume_after,
                    console=console,
                )
            )
        for note in data.notes:
            tracker.note(note)
        run.run(tracker, resume_after)


def check_ranks(config: SFTConfig) -> None:
    """Raise ConfigError if the launcher has started another number of ranks than the config says."""
    launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if launched != config.world_size:
        raise ConfigError([Problem("world_size", f"{config.world_size}, but {launched} ranks were started")])


def _remove_whole(folder: Path) -> None:
    """Remove a folder so that no half of it is ever there under its name."""
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.removed")))


class SFTRun:
    """The training loop of one rank."""

    def __init__(self, config: SFTConfig, data: SFTData, state: ParallelState, checkpoints: SFTCheckpoints) -> None:
        self.config, self.state, self.checkpoints = config, state, checkpoints
        self.tracker: RunTracker | Unseen = Unseen()
        self.process = data_process(
            use_packed_dataset=config.use_packed_dataset,
            micro_bsz=config.micro_bsz,
            seq_len=config.seq_len,
            mode=state.mode,
            sp_rank=state.cp.rank(),
            sp_size=state.cp.size(),
        )
        self.strategy = MegatronTrainStrategy(config.strategy_settings(self._model_folder(data)), state)
        self.strategy.initialize()
        ramp_up = None if config.ramp_up is None else RampUp(**config.ramp_up.model_dump())
        self.loader = self._loader(data.train, config.micro_num, ramp_up)
        self.held_out = self._held_out(data.held_out)
        self._first: list[Any] | None = None

    def prepare(self, resume_after: int | None) -> None:
        """Load the checkpoint, or read the first batch: if that fails, nothing has been changed yet."""
        if resume_after is None:
            self._first = load_batch(self.loader, self.strategy.device)[0]
        else:
            self.checkpoints.load(self.strategy, self.loader)

    def run(self, tracker: RunTracker | Unseen, resume_after: int | None) -> None:
        """All steps, with a measurement before the first, every `eval_every` steps, and after the last."""
        config = self.config
        self.tracker = tracker
        if resume_after is None and self.held_out:
            tracker.log(0, self.evaluate())
        for step in range((resume_after or 0) + 1, config.steps + 1):
            metrics, tokens = self.step()
            if self.held_out and (step % config.eval_every == 0 or step == config.steps):
                metrics |= self.evaluate()
            self.tracker.log(step, metrics, tokens=tokens)
            if not metrics["labels"]:
                self.tracker.note(f"step {step}: skipped, because none of its tokens is a label")
            if config.save_every is not None and (step % config.save_every == 0 or step == config.steps):
                with self.tracker.phase("save"):
                    self.checkpoints.save(step, self.strategy, self.loader)
        with self.tracker.phase("save"):
            self.strategy.save_hf((config.run_dir / FINAL_MODEL).absolute())

    def step(self) -> tuple[dict[str, float], int]:
        """One optimizer step; its metrics, and the number of tokens that all ranks had in their packs."""
        with self.tracker.phase("data"):
            batch, self._first = self._first or load_batch(self.loader, self.strategy.device)[0], None
        with self.tracker.phase("train"):
            metrics = self.strategy.train_tokens(list(load_accum_batches(batch, self.process)))
        count = torch.tensor([self.loader.last.real, self.loader.last.total], device=self.strategy.device)
        dist.all_reduce(count, group=self.state.dp)
        real, total = count.tolist()
        labels = int(metrics.pop("tokens"))
        return metrics | {"labels": labels, "real_tokens": real / total}, real

    def evaluate(self) -> dict[str, float]:
        """The loss on the held-out packs."""
        with self.tracker.phase(EVALUATION):
            return {"eval/loss": self.strategy.token_loss(self.held_out)}

    def _loader(
        self, dataset: PackedDataset, micro_num: int, ramp_up: RampUp | None = None, prefetch: int = 2
    ) -> PackedLoader:
        dp_rank, dp_size = self.state.at.dp, self.state.degrees.dp
        sampler = PackBatchSampler(len(dataset), micro_num=micro_num, dp_rank=dp_rank, dp_size=dp_size, ramp_up=ramp_up)
        return PackedLoader(dataset, sampler, prefetch=prefetch)

    def _held_out(self, dataset: PackedDataset | None) -> list[TokenMicroBatch]:
        """This rank's share of the held-out packs, kept in memory: the loss is one mean over all of them."""
        if dataset is None:
            return []
        share = -(-len(dataset) // self.state.degrees.dp)
        batch, _ = load_batch(self._loader(dataset, share, prefetch=0), self.strategy.device)
        return list(load_accum_batches(batch, self.process))

    def _model_folder(self, data: SFTData) -> Path:
        """The folder that the model starts from; made by one rank where there are no weights."""
        if self.config.model.path is not None:
            return self.config.model.path
        architecture, folder = self.config.model.architecture, self.config.run_dir / UNTRAINED_MODEL

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            write_untrained_model(folder, architecture, data.tokenizer)

        on_rank_0(write)
        return folder
