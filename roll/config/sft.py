"""The config of a supervised run on packed data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import PositiveFloat, PositiveInt, StringConstraints

from roll.config.model_parallel import model_split_checks, world_size_checks
from roll.config.model_source import ModelSource, architecture_of, folder_problems
from roll.config.optimizer import OptimizerSettings
from roll.config.parallel import ParallelSettings
from roll.config.paths import PathSetting
from roll.config.problems import Check, Problem, run_checks
from roll.config.settings import Seed, Settings
from roll.config.sft_data import SFTDataSettings
from roll.config.strategy import DType, StrategySettings


class RampUpSettings(Settings):
    """A batch that grows up to `micro_num` packs per data-parallel rank."""

    start: PositiveInt
    """Packs per rank and step at the beginning."""
    increment: PositiveInt
    """Packs that are added each time."""
    every: PositiveInt
    """Steps between two additions."""


class SFTConfig(Settings):
    """A whole supervised run."""

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]
    """Name of the run, and of its folder under `output_dir`."""
    output_dir: PathSetting = Path("runs")
    """Folder that holds the folders of runs, seen from the working directory."""
    seed: Seed = 0
    """Seed of random weights, of the order of samples, and of which are held out."""
    dtype: DType = "float32"
    """Type of weights and activations."""
    model: ModelSource
    """Model to train: a folder to fine-tune, or an architecture to train from random weights."""
    alphabet: str | None = None
    """Characters of the tokenizer that goes with model.config; null: those of roll.data.tokenizer."""
    data: SFTDataSettings
    """Data that it learns from."""
    micro_bsz: PositiveInt = 1
    """With `seq_len` the length of a pack; without packing the rows of one."""
    seq_len: PositiveInt
    """Longest segment in tokens."""
    micro_num: PositiveInt = 1
    """Packs per data-parallel rank and step."""
    use_packed_dataset: bool = True
    """Whether packs are filled by cutting samples, or hold up to `micro_bsz` whole ones."""
    ramp_up: RampUpSettings | None = None
    """A batch that grows; null: `micro_num` packs from the start."""
    world_size: PositiveInt = 1
    """Ranks, one process each."""
    parallel: ParallelSettings = ParallelSettings()
    """Division of these ranks; those that are left make data-parallel copies."""
    optimizer: OptimizerSettings
    """Update of the weights."""
    steps: PositiveInt
    """Optimizer steps."""
    eval_every: PositiveInt = 50
    """Steps between measurements of the held-out loss, which is also measured before the first step and after the
    last."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints, of which the newest is kept, with one after the last step; null: none."""
    resume: bool = False
    """Whether to continue from the checkpoint in the run's folder. Otherwise the run starts anew, in place of an
    earlier one of the same name."""
    process_group_timeout_s: PositiveFloat = 600
    """Seconds after which a collective that some rank never joins is an error."""

    @property
    def run_dir(self) -> Path:
        """The folder of this run."""
        return self.output_dir / self.name

    @property
    def pack_length(self) -> int:
        """P, tokens of a pack."""
        return self.micro_bsz * self.seq_len

    def strategy_settings(self, model_path: Path) -> StrategySettings:
        """Settings of the strategy; `model_path` is the folder of the model, with or without weights."""
        return StrategySettings(
            name="megatron_train",
            model_path=model_path,
            family=self.model.folder_family,
            init="load" if self.model.config is None else "random",
            parallel=self.parallel,
            optimizer=self.optimizer,
            dtype=self.dtype,
            seed=self.seed,
        )

    def checks(self) -> Iterable[Check]:
        return (
            self._model_folder_is_usable,
            self._alphabet_has_a_model,
            self._model_fits_ranks,
            self._degrees_fit_world_size,
            self._sequence_fits_context,
            self._sequence_divides,
            self._ramp_up_fits,
        )

    def _model_folder_is_usable(self) -> Iterator[Problem]:
        folder = self.model.path
        if folder is None or self.model.config is not None:
            return
        yield from folder_problems("model.path", folder, self.model.family)
        if folder.absolute().is_relative_to(self.run_dir.absolute()):
            yield Problem("name", f"model.path {str(folder)!r} lies in the folder of this run, which replaces it")

    def _alphabet_has_a_model(self) -> Iterator[Problem]:
        if self.alphabet is not None and self.model.path is not None:
            path = str(self.model.path)
            yield Problem("alphabet", f"must be null, because the tokenizer is that of model.path {path!r}")

    def _model_fits_ranks(self) -> Iterator[Problem]:
        yield from run_checks(model_split_checks(architecture_of(self.model), self.parallel))

    def _degrees_fit_world_size(self) -> Iterator[Problem]:
        yield from run_checks(world_size_checks(self.parallel, self.world_size))

    def _sequence_fits_context(self) -> Iterator[Problem]:
        context = architecture_of(self.model).context_length
        if self.seq_len > context:
            yield Problem("seq_len", f"{self.seq_len} is over the model's context of {context} tokens")

    def _sequence_divides(self) -> Iterator[Problem]:
        """In mode isp rows are cut when they are loaded; elsewhere the strategy fills them up."""
        if self.parallel.mode != "isp":
            return
        sp = self.parallel.sp
        packed = f"micro_bsz {self.micro_bsz} x seq_len {self.seq_len} = {self.pack_length}"
        length, name = (self.pack_length, packed) if self.use_packed_dataset else (self.seq_len, str(self.seq_len))
        if length % sp:
            split = f"the {sp} parts of the sequence, parallel.sp {sp} of mode isp"
            yield Problem("seq_len", f"{name} is not a multiple of {split}")

    def _ramp_up_fits(self) -> Iterator[Problem]:
        if self.ramp_up is not None and self.ramp_up.start > self.micro_num:
            yield Problem("ramp_up.start", f"{self.ramp_up.start} is over micro_num {self.micro_num}")
