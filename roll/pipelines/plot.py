"""The pictures of runs: a run's curves by the names of their metrics, and what is drawn of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from roll.pipelines.records import replace_file

Points = Sequence[tuple[int, float]]  # (step, value), steps rising


@dataclass(frozen=True)
class Picture:
    """A figure of some of a run's metrics."""

    file: str
    """Its name in the run's folder."""
    metrics: tuple[str, ...]
    """Whose points `draw` takes behind the title, in this order; any may have none yet, but not all."""
    draw: Callable[..., Figure]


def reward_figure(title: str, reward: Points, exact_match: Points) -> Figure:
    """Reward above, exact match below (left out when there is none), over the same steps."""
    panels = [("mean reward", reward, "C0"), ("exact match (held out)", exact_match, "C1")]
    panels = [panel for panel in panels if panel[1]]
    figure, axes = _panels(max(1, len(panels)))
    for ax, (label, points, color) in zip(axes, panels, strict=False):
        _draw(ax, points, color)
        ax.set_ylabel(label)
    if exact_match:
        axes[-1].set_ylim(-0.02, 1.02)
    axes[0].set_title(title)
    return figure


def loss_figure(title: str, loss: Points, held_out: Points) -> Figure:
    """The loss of each training step and the held-out loss, over the same axes."""
    figure, (ax,) = _panels(1)
    for label, points, color in (("training", loss, "C0"), ("held out", held_out, "C1")):
        if points:
            _draw(ax, points, color, label)
    ax.set_ylabel("loss (nats per token)")
    ax.legend()
    ax.set_title(title)
    return figure


def save_picture(path: Path, title: str, picture: Picture, curves: Sequence[Points]) -> None:
    """Draw the picture and replace the PNG file at `path` with it."""
    png = io.BytesIO()
    picture.draw(title, *curves).savefig(png, format="png", dpi=110)
    replace_file(path, png.getvalue())


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    """A figure of axes one above the other, over the same steps."""
    figure = Figure(figsize=(7, 2.8 * number), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(number, squeeze=False, sharex=True)[:, 0])
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _draw(ax: Axes, points: Points, color: str, label: str = "") -> None:
    steps, values = zip(*points, strict=True)
    ax.plot(steps, values, color=color, marker="." if len(points) < 100 else "", label=label)
    ax.grid(alpha=0.3)


REWARD_PICTURE = Picture("reward.png", ("reward", "eval/exact_match"), reward_figure)
LOSS_PICTURE = Picture("loss.png", ("loss", "eval/loss"), loss_figure)
