"""Draws the pictures of README.md and of docs/tutorial.md: the tutorial's losses, in three panels.

python examples/tutorial_curves.py torch|jax PICTURE.svg

PICTURE.svg has the panels side by side. PICTURE-phone.svg has one above the other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import os
import tempfile

import matplotlib
from matplotlib.figure import Figure

from healcore.tools.report.figure import STYLE, to_svg

TITLES = {
    "none": "no protection",
    "attach": "attach: skips NaN",
    "protect": "protect: skips NaN",
    "healer": "Healer: rolls back too",
}
LOSS, UNDONE, ARC, QUIET, BAD = "#0072b2", "#d98200", "#6a4fb3", "#5b6570", "#a3210f"
SIZES = {"": (7.2, 3.1), "-phone": (3.8, 6.6)}
"""End of the file's name -> width and height of the picture in inches."""


def attempts(losses):
    """Splits the steps where a rollback sets the step back."""
    parts = [[]]
    for step, loss in losses:
        if parts[-1] and step <= parts[-1][-1][0]:
            parts.append([])
        parts[-1].append((step, loss))
    return parts


def run(example, protection, faults=True):
    """Trains, and returns the losses and the printed loss on unseen data."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        losses = example.main(protection, faults=faults)
    return losses, float(printed.getvalue().split()[-1])


def plot_run(axes, losses):
    """The curve of one run; steps that a rollback has undone have a colour of their own."""
    *undone, last = attempts(losses)
    axes.plot(*zip(*last, strict=True), color=LOSS, lw=1.2, label="this run")
    for attempt in undone:
        back, end = last[0][0], attempt[-1][0]
        kept = [point for point in attempt if point[0] <= back]
        axes.plot(*zip(*kept, strict=True), color=LOSS, lw=1.2)
        gone = [point for point in attempt if point[0] >= back]
        axes.plot(*zip(*gone, strict=True), color=UNDONE, lw=1.2, label="undone steps")
        bend = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.4", "color": ARC}
        axes.annotate("", (back, 150), (end, 150), arrowprops=bend)
        axes.text(back - 12, 150, "rollback", color=ARC, ha="right")
    finite = [(step, loss) for step, loss in last if math.isfinite(loss)]
    if len(finite) < len(last) / 2:
        axes.plot(*finite[-1], "x", color=BAD, label="last finite loss")


def draw(healthy, runs, size):
    """Three panels, side by side if the picture is wide, else one above the other."""
    figure = Figure(figsize=size, layout="constrained")
    is_wide = size[0] > size[1]
    shape = (1, len(runs)) if is_wide else (len(runs), 1)
    panels = figure.subplots(*shape, sharex=True, sharey=True)
    for axes, (protection, (losses, final)) in zip(panels, runs.items(), strict=True):
        axes.plot(*zip(*healthy, strict=True), color=QUIET, lw=0.8, label="without faults")
        plot_run(axes, losses)
        for begin, end in ((120, 120), (350, 400)):
            axes.axvspan(begin, end, color=BAD, alpha=0.15, lw=0.8)
        axes.set_title(TITLES[protection], loc="left", size=10, weight="bold")
        shown = f"{final:.1f}" if final >= 1 else f"{final:.3g}"
        words = f"ends at {shown}" if math.isfinite(final) else "ends at NaN"
        axes.text(0.98, 0.02, words, transform=axes.transAxes, ha="right", size=11, weight="bold")
        axes.set(yscale="log", ylim=(0.004, 1000), xticks=(0, 200, 400, 600))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        if is_wide or axes is panels[-1]:
            axes.set_xlabel("step")
        if not is_wide or axes is panels[0]:
            axes.set_ylabel("training loss")
    panels[0].text(132, 3, "one batch\nhas NaN", color=QUIET, size=8)
    # The first run is over at the first fault, so the second fault is named where it does harm.
    panels[1].text(340, 150, "rate 100×\ntoo high", color=QUIET, size=8, ha="right", va="center")
    legend = {}
    for axes in panels:
        legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = 4 if is_wide else 2
    place = "outside lower center" if is_wide else "outside upper left"
    figure.legend(legend.values(), legend.keys(), loc=place, ncols=columns, frameon=False)
    return to_svg(figure)


def write(framework, picture):
    """Trains the tutorial four times, and writes both pictures."""
    example = importlib.import_module(f"tutorial_{framework}")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # for checkpoints
        healthy, _ = run(example, "none", faults=False)
        runs = {protection: run(example, protection) for protection in example.TRAIN}
    name, end = os.path.splitext(picture)
    with matplotlib.rc_context(STYLE):
        for form, size in SIZES.items():
            with open(f"{name}{form}{end}", "w", encoding="utf-8") as file:
                file.write(draw(healthy, runs, size))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the losses of the tutorial.")
    parser.add_argument("framework", choices=["torch", "jax"])
    parser.add_argument("picture", type=os.path.abspath, metavar="PICTURE.svg")
    options = parser.parse_args()
    write(options.framework, options.picture)
