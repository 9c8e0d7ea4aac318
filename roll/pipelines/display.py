"""What a run shows while it runs: a live table on a terminal, one printed line per step elsewhere (CI, job logs)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class StepReport:
    """The figures of one finished step. `values` are the metrics to show, `phases` seconds per phase."""

    step: int
    values: Mapping[str, int | float]
    seconds: float
    tokens_per_second: float | None
    phases: Mapping[str, float]


class Display(ABC):
    """Where a tracker shows its figures. Calls but `note` come from one thread, `stop` is the last."""

    @abstractmethod
    def show(self, report: StepReport) -> None:
        """Show a finished step."""

    @abstractmethod
    def enter(self, phase: str | None) -> None:
        """Say what is being done now; None: between phases."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Print a line that stays. Any thread may call it."""

    @abstractmethod
    def stop(self) -> None:
        """Leave the terminal as it was found. The last figures stay."""


def start_display(console: Console, title: str, total_steps: int) -> Display:
    """A live display if the console is a terminal that can redraw, else a printing one."""
    if console.is_interactive:
        return LiveDisplay(console, title, total_steps)
    return PlainDisplay(console, total_steps)


class PlainDisplay(Display):
    """One line per step, never wrapped or coloured, flushed at once."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps

    def show(self, report: StepReport) -> None:
        parts = [f"step {report.step}/{self._total_steps}"]
        parts += [f"{name} {_figure(value)}" for name, value in report.values.items()]
        if report.tokens_per_second is not None:
            parts.append(f"{report.tokens_per_second:.0f} tokens/s")
        parts += [f"{report.seconds:.1f}s"] + [f"{name} {seconds:.1f}s" for name, seconds in report.phases.items()]
        self.note("  ".join(parts))

    def enter(self, phase: str | None) -> None:
        pass  # a line per phase would drown the lines per step

    def note(self, text: str) -> None:
        self._console.file.write(f"{text}\n")  # In one piece, since notes come from several threads.
        self._console.file.flush()

    def stop(self) -> None:
        pass


class LiveDisplay(Display):
    """A progress line, a table of the latest figures and the seconds per phase, redrawn in place."""

    def __init__(self, console: Console, title: str, total_steps: int) -> None:
        self._console = console
        self._title = title
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._report: StepReport | None = None
        self._latest: dict[str, int | float | None] = {}
        self._phase: tuple[str, float] | None = None
        # The refresh thread calls _render: every attribute it reads is replaced whole, never changed in place.
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def show(self, report: StepReport) -> None:
        # Measurements stay until the next one; a step without a loss (a skipped one) does not show an older step's.
        stay = {name: value for name, value in self._latest.items() if name.startswith("eval/")}
        names = dict.fromkeys([*self._latest, *report.values])
        self._report, self._latest = report, {name: report.values.get(name, stay.get(name)) for name in names}

    def enter(self, phase: str | None) -> None:
        self._phase = None if phase is None else (phase, time.monotonic())

    def note(self, text: str) -> None:
        self._live.console.print(escape(text), highlight=False)

    def stop(self) -> None:
        self._phase = None
        self._live.stop()

    def _render(self) -> Group:
        report, latest = self._report, self._latest
        lines: list[Table | Text] = [self._progress_line(report)]
        if report is not None:
            table = Table(*latest, "tokens/s", "s/step", pad_edge=False)
            speed = "-" if report.tokens_per_second is None else f"{report.tokens_per_second:.0f}"
            table.add_row(*(_figure(value) for value in latest.values()), speed, f"{report.seconds:.1f}")
            lines.append(table)
            lines.append(Text("  ".join(f"{name} {seconds:.1f}s" for name, seconds in report.phases.items()), "dim"))
        return Group(*lines)

    def _progress_line(self, report: StepReport | None) -> Table:
        step, phase = (0 if report is None else report.step), self._phase
        now = time.monotonic()
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(
            Text(self._title, "bold"),
            f"step {step}/{self._total_steps}",
            ProgressBar(total=self._total_steps, completed=step, width=24),
            _clock(now - self._started),
            "" if phase is None else Text(f"{phase[0]} {now - phase[1]:.0f}s", "cyan"),
        )
        return line


def _figure(value: int | float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
