"""The picture of a run: reward of each training step, and exact match on held-out prompts where it was measured."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from roll.pipelines.records import replace_file

Points = Sequence[tuple[int, float]]  # (step, value), steps rising


def reward_figure(title: str, reward: Points, exact_match: Points) -> Figure:
    """The figure: reward above, exact match below (left out when there is none), over the same steps."""
    panels = [("mean reward", reward, "C0"), ("exact match (held out)", exact_match, "C1")]
    panels = [panel for panel in panels if panel[1]]
    figure = Figure(figsize=(7, 2.8 * max(1, len(panels))), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(max(1, len(panels)), squeeze=False, sharex=True)[:, 0])
    for ax, (label, points, color) in zip(axes, panels, strict=False):
        steps, values = zip(*points, strict=True)
        ax.plot(steps, values, color=color, marker="." if len(points) < 100 else "")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    if exact_match:
        axes[-1].set_ylim(-0.02, 1.02)
    axes[0].set_title(title)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def save_reward_picture(path: Path, title: str, reward: Points, exact_match: Points) -> None:
    """Draw the figure and replace the PNG file at `path` with it."""
    png = io.BytesIO()
    reward_figure(title, reward, exact_match).savefig(png, format="png", dpi=110)
    replace_file(path, png.getvalue())
