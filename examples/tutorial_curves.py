"""Draws the pictures of docs/tutorial.md: the losses of the tutorial with each protection.

python examples/tutorial_curves.py torch|jax PICTURE.png
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import tempfile

from matplotlib.figure import Figure

TITLES = {
    "none": "no protection: NaN from step 120 on",
    "attach": "attach: the step with NaN is skipped, the damage of the learning rate stays",
    "protect": "protect: the step with NaN is skipped, the damage of the learning rate stays",
    "healer": "Healer: rolls back and repeats the steps with the earlier learning rate",
}


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
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    panels = figure.subplots(3, sharex=True, sharey=True)
    for axes, protection in zip(panels, example.TRAIN, strict=True):
        *undone, last = attempts(example.main(protection))
        axes.axvspan(350, 400, color="0.9", label="learning rate 100 times too high")
        axes.axvline(120, color="0.6", linestyle=":", label="batch with NaN")
        for attempt in undone:
            back, (end, loss) = last[0][0], attempt[-1]
            kept = [point for point in attempt if point[0] <= back]
            axes.plot(*zip(*kept, strict=True), color="#0072b2", linewidth=1)
            gone = [point for point in attempt if point[0] >= back]
            axes.plot(*zip(*gone, strict=True), color="#e69f00", linewidth=1, label="undone")
            axes.plot([end, back], [loss, last[0][1]], "k:", linewidth=1.5, label="rollback")
        axes.plot(*zip(*last, strict=True), color="#0072b2", linewidth=1)
        finite = [(step, loss) for step, loss in last if math.isfinite(loss)]
        if len(finite) < len(last) / 2:
            axes.plot(*finite[-1], "x", color="#d55e00", label="last finite loss")
        axes.set_title(TITLES[protection], loc="left", fontsize=10)
        axes.set_yscale("log")
        axes.set_ylabel("loss")
        axes.legend(loc="upper left", fontsize=7.5)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws the losses of the tutorial.")
    parser.add_argument("framework", choices=["torch", "jax"])
    parser.add_argument("picture", type=os.path.abspath, metavar="PICTURE.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for the checkpoints
        draw(options.framework, options.picture)
