"""What a run leaves behind and shows: its files and its display.

    run_dir/
      config.yaml              the configuration of the run, resolved
      metrics.jsonl            one object per step: {"step": 12, "kl": 0.01, "reward": 0.5, ...}; nothing in it depends
                               on the clock: two runs with one seed write the same bytes
      timings.jsonl            one object per step: everything that does depend on it; phases after the last step come
                               under "step": null
      tensorboard/             the same metrics as TensorBoard events, timings under "time/"
      samples/step_00012.jsonl a few prompts with the model's responses
      logs/                    what the workers of a PPO run print, a file for each
      reward.png               the curves of reward and held-out exact match, or another picture that is asked for

Every file is whole at any moment, however the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from roll.config import expand_path
from roll.errors import UserError
from roll.pipelines.display import Display, StepReport, start_display
from roll.pipelines.plot import REWARD_PICTURE, Picture, save_picture
from roll.pipelines.records import (
    JsonLinesFile,
    keep_records,
    plain_number,
    replace_file,
    split_not_finite,
    temporary_path,
    to_json_line,
)

SHOWN_METRICS = ("reward", "eval/exact_match", "kl", "entropy", "loss")
EVALUATION = "eval"
"""The phase whose seconds do not count for tokens/s: its tokens are not those of the step."""
RESERVED_NAMES = ("step", "not_finite")


@dataclass(frozen=True)
class Sample:
    """One completion, as it is written to the samples of a step."""

    prompt: str
    response: str
    reward: float
    answer: str | None


class RunTracker:
    """Writes the files of one run and shows its progress, from `with` to its end.

        with RunTracker(run_dir, config_yaml=text, total_steps=60, title="PPO on chain_sum") as tracker:
            for step in range(1, 61):
                with tracker.phase("rollout"):
                    ...
                tracker.log(step, {"reward": 0.5, "kl": kl_tensor}, tokens=4096)

    `run_dir` is created. If it holds an earlier run, that run's files of the kinds above are deleted first, so that two
    runs never mix; anything else in it (checkpoints, notes) stays. With `resume_after` that run goes on behind this
    step: its records up to there are kept. `shown` names the metrics on the display. `picture` is redrawn every
    `plot_every` steps and at the end. On a console that is no terminal each step prints one line.

    Raises ValueError if `run_dir` is a file.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        config_yaml: str,
        total_steps: int,
        title: str,
        shown: Sequence[str] = SHOWN_METRICS,
        picture: Picture = REWARD_PICTURE,
        plot_every: int = 5,
        resume_after: int | None = None,
        console: Console | None = None,
    ) -> None:
        self.run_dir = expand_path(run_dir)
        self.title = title
        self.total_steps = total_steps
        self._config_yaml = config_yaml
        self._shown = tuple(shown)
        self._picture = picture
        self._plot_every = plot_every
        self._resume_after = resume_after
        self._console = Console() if console is None else console
        self._resources = ExitStack()
        self._curves: dict[str, list[tuple[int, float]]] = {name: [] for name in picture.metrics}
        self._last_step = resume_after
        self._logged = 0
        self._phase_names: list[str] = []
        self._phase_seconds: dict[str, float] = {}

    def __enter__(self) -> RunTracker:
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise UserError(f"run_dir must be a folder, {self.run_dir} is a file")
        if self._resume_after is None:
            _remove_earlier_run(self.run_dir, self._picture)
        else:
            self._keep_earlier_steps(self._resume_after)
        (self.run_dir / "samples").mkdir(parents=True, exist_ok=True)
        replace_file(self.run_dir / "config.yaml", self._config_yaml.encode())
        with ExitStack() as resources:  # closes what is open if a later one fails
            self._metrics = JsonLinesFile(self.run_dir / "metrics.jsonl")
            resources.callback(self._metrics.close)
            self._timings = JsonLinesFile(self.run_dir / "timings.jsonl")
            resources.callback(self._timings.close)
            resources.callback(self._write_last_phases)
            unseen = None if self._resume_after is None else self._resume_after + 1
            self._events = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=unseen)
            resources.callback(self._events.close)
            resources.callback(self._draw)
            self._display: Display = start_display(self._console, self.title, self.total_steps)
            resources.callback(self._display.stop)
            self._step_started = time.perf_counter()
            self._resources = resources.pop_all()
        self.note(f"{self.title}: {self.total_steps} steps, files in {self.run_dir}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside, also when it raises, to phase `name` of the step that is logged next.

        Phases of one name add up; a phase inside another counts for both.
        """
        started = time.perf_counter()
        self._phase_names.append(name)
        self._display.enter(name)
        try:
            yield
        finally:
            self._phase_names.pop()
            self._display.enter(self._phase_names[-1] if self._phase_names else None)
            seconds = time.perf_counter() - started
            self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + seconds

    def log(self, step: int, metrics: Mapping[str, Any], *, tokens: int | None = None) -> None:
        """Record a finished step, once, steps rising (0 may be an evaluation before the first).

        `metrics` are ints, floats, NumPy scalars or 0-dim tensors. They are written in alphabetical order. One that is
        NaN or infinite is written as null and named under "not_finite", and the display says so. `tokens` are those
        processed in the step, for tokens/s over the seconds outside of phase `EVALUATION`.

        Raises ValueError for a step that does not rise, a value that is no number, or a reserved name.
        """
        if self._last_step is not None and step <= self._last_step:
            raise UserError(f"steps must rise: step {step} was logged after step {self._last_step}")
        for name in RESERVED_NAMES:
            if name in metrics:
                raise UserError(f"a metric may not be called {name!r}")
        values = {name: plain_number(metrics[name], name) for name in sorted(metrics)}
        written, not_finite = split_not_finite(values)
        self._metrics.append({"step": step, **written} | ({"not_finite": not_finite} if not_finite else {}))
        self._last_step = step
        self._logged += 1
        report = self._finish_step(step, values, tokens)
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        self._display.show(report)
        for name, what in not_finite.items():
            self.note(f"step {step}: metric {name} is {what}")
        self._add_points(step, values)
        if self._logged % self._plot_every == 0:
            self._draw()

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write a few completions of a step to `samples/step_00012.jsonl` (replaced if it is there)."""
        lines = []
        for sample in samples:
            reward, _ = split_not_finite({"reward": plain_number(sample.reward, "reward")})
            lines.append(to_json_line(asdict(sample) | reward))
        replace_file(self.run_dir / "samples" / f"step_{step:05d}.jsonl", b"".join(lines))

    def note(self, text: str) -> None:
        """Print a line that stays above the live display. Any thread may call it."""
        self._display.note(text)

    def _keep_earlier_steps(self, last_step: int) -> None:
        keep_records(self.run_dir / "timings.jsonl", last_step)
        for record in keep_records(self.run_dir / "metrics.jsonl", last_step):
            not_finite = {name: float(what) for name, what in record.pop("not_finite", {}).items()}
            self._add_points(record["step"], record | not_finite)

    def _add_points(self, step: int, values: Mapping[str, int | float]) -> None:
        for name, points in self._curves.items():
            if name in values:  # NaN leaves a gap in the curve
                points.append((step, values[name]))

    def _finish_step(self, step: int, values: Mapping[str, int | float], tokens: int | None) -> StepReport:
        """Write the timings of the step and start those of the next."""
        now = time.perf_counter()
        seconds, self._step_started = now - self._step_started, now
        phases, self._phase_seconds = self._phase_seconds, {}
        speed = None if tokens is None else tokens / (seconds - phases.get(EVALUATION, 0.0))
        self._timings.append(
            {"step": step, "seconds": seconds, "tokens": tokens, "tokens_per_second": speed, "phases": phases}
        )
        for name, value in {"time/step": seconds, "time/tokens_per_second": speed}.items():
            if value is not None:
                self._events.add_scalar(name, value, step)
        for name, value in phases.items():
            self._events.add_scalar(f"time/{name}", value, step)
        shown = {name: values[name] for name in self._shown if name in values}
        return StepReport(step=step, values=shown, seconds=seconds, tokens_per_second=speed, phases=phases)

    def _write_last_phases(self) -> None:
        if self._phase_seconds:
            seconds = time.perf_counter() - self._step_started
            self._timings.append({"step": None, "seconds": seconds, "phases": self._phase_seconds})

    def _draw(self) -> None:
        if any(self._curves.values()):
            curves = list(self._curves.values())
            save_picture(self.run_dir / self._picture.file, self.title, self._picture, curves)


def _remove_earlier_run(run_dir: Path, picture: Picture) -> None:
    """Delete the files that a tracker writes, and nothing else."""
    whole = [run_dir / name for name in ("config.yaml", "metrics.jsonl", "timings.jsonl", picture.file)]
    samples = [*run_dir.glob("samples/step_*.jsonl"), *run_dir.glob("samples/.step_*.jsonl.tmp")]
    events = [*run_dir.glob("tensorboard/events.out.tfevents.*"), *run_dir.glob("logs/*.log")]
    for path in [*whole, *map(temporary_path, whole), *samples, *events]:
        path.unlink(missing_ok=True)
