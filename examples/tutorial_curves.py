"""Draws the pictures of docs/tutorial.md: the losses of the tutorial with each protection.

python examples/tutorial_curves.py torch|jax PICTURE.svg
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import tempfile

import matplotlib
from matplotlib.figure import Figure

from healcore.tools.report.page import STYLE, to_svg

TITLES = {
    "none": "No protection: NaN from step 120 on",
    "attach": "attach: NaN skipped, the damage at 350 stays",
    "protect": "protect: NaN skipped, the damage at 350 stays",
    "healer": "Healer: rolls back, repeats at the earlier rate",
}
LOSS, UNDONE, ARC, QUIET, BAD = "#0072b2", "#d98200", "#6a4fb3", "#5b6570", "#a3210f"


def attempts(losses):
    """Splits the steps where a rollback sets the step back."""
    parts = [[]]
    for step, loss in losses:
        if parts[-1] and step <= parts[-1][-1][0]:
            parts.append([])
        parts[-1].append((step, loss))
    return parts


def draw(framework, path):
    example = importlib.import_module(f"tutorial_{framework}")
    healthy = example.main("none", faults=False)
    figure = Figure(figsize=(4.4, 5.8), layout="constrained")
    panels = figure.subplots(3, sharex=True, sharey=True)
    for axes, protection in zip(panels, example.TRAIN, strict=True):
        *undone, last = attempts(example.main(protection))
        axes.plot(*zip(*healthy, strict=True), color=QUIET, lw=0.8, label="without faults")
        axes.plot(*zip(*last, strict=True), color=LOSS, lw=1.2, label="this run")
        for attempt in undone:
            back, end = last[0][0], attempt[-1][0]
            kept = [point for point in attempt if point[0] <= back]
            axes.plot(*zip(*kept, strict=True), color=LOSS, lw=1.2)
            gone = [point for point in attempt if point[0] >= back]
            axes.plot(*zip(*gone, strict=True), color=UNDONE, lw=1.2, label="undone steps")
            bend = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.3", "color": ARC}
            axes.annotate("", (back, 150), (end, 150), arrowprops=bend)
            axes.text(end + 8, 150, "rollback", color=ARC)
        finite = [(step, loss) for step, loss in last if math.isfinite(loss)]
        if len(finite) < len(last) / 2:
            axes.plot(*finite[-1], "x", color=BAD, label="last finite loss")
        for begin, end in ((120, 120), (350, 400)):
            axes.axvspan(begin, end, color=BAD, alpha=0.15, lw=0.8)
        axes.set_title(TITLES[protection], loc="left", size="medium", weight="bold")
        axes.set(yscale="log", ylabel="training loss", ylim=(0.02, 1000))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].text(126, 150, "batch 120 has NaN", color=QUIET)
    wrong = {"color": QUIET, "ha": "right"}
    panels[0].text(344, 2, "rate 100 times too high\nin steps 350 to 399", **wrong)
    panels[-1].set_xlabel("optimizer step")
    legend = {}
    for axes in panels:
        legend |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=2, frameon=False)
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_svg(figure))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the losses of the tutorial.")
    parser.add_argument("framework", choices=["torch", "jax"])
    parser.add_argument("picture", type=os.path.abspath, metavar="PICTURE.svg")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, matplotlib.rc_context(STYLE):
        os.chdir(folder)  # for the checkpoints
        draw(options.framework, options.picture)
