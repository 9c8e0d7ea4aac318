"""The config of a supervised run on packed data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, Strict, StringConstraints

from roll.config.model_parallel import model_split_checks, world_size_checks
from roll.config.model_source import ModelSource, architecture_of, folder_problems
from roll.config.optimizer import OptimizerSettings
from roll.config.parallel import ParallelSettings
from roll.config.problems import Check, Problem, run_checks
from roll.config.settings import Settings
from roll.config.strategy import DType, StrategySettings

Files = Annotated[tuple[str, ...], Strict(False)]
SourceKind = Literal["text", "conversations", "tokenized"]


class SFTDataSettings(Settings):
    """What the model learns from, and what it is measured on."""

    kind: SourceKind
    """text: UTF-8 files, a sample for each paragraph; conversations: jsonl or parquet with messages, or prompt and
    response; tokenized: InternEvo's .bin files, or folders of them."""
    files: Annotated[Files, Field(min_length=1)]
    """Files to train on, seen from the working directory; patterns such as docs/**/*.md stand for what matches them."""
    held_out_files: Files = ()
    """Files that are only measured on."""
    held_out_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples, drawn by the run's seed, that is only measured on; with no `held_out_files`."""

    def checks(self) -> Iterable[Check]:
        return (self._held_out_once,)

    def _held_out_once(self) -> Iterator[Problem]:
        if self.held_out_files and self.held_out_share:
            yield Problem("held_out_share", f"must be 0 where there are held_out_files, got {self.held_out_share}")


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
    output_dir: Annotated[Path, Strict(False)] = Path("runs")
    """Folder that holds the folders of runs, seen from the working directory."""
    seed: NonNegativeInt = 0
    """Seed of random weights, of the order of samples, and of which are held out."""
    dtype: DType = "float32"
    """Type of weights and activations."""
    model: ModelSource
    """What is trained: a folder to fine-tune, or an architecture to train from random weights."""
    alphabet: str | None = None
    """Characters of the tokenizer that goes with model.config; null: those of roll.data.tokenizer."""
    data: SFTDataSettings
    """What it learns from."""
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
    """How these ranks are divided; those that are left make data-parallel copies."""
    optimizer: OptimizerSettings
    """How the weights are updated."""
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
        """What the strategy is built from; `model_path` is the folder of the model, with or without weights."""
        return StrategySettings(
            name="megatron_train",
            model_path=model_path,
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
        yield from folder_problems(self.model)

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
