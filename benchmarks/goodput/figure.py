"""Two pictures: goodput by ranks for each policy, and by checkpoint interval for each size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = ("#8c8c8c", "#0b6e4f", "#d1495b", "#2e5eaa", "#c98a1b", "#8d5a97")


def draw(by_ranks: list[dict[str, Any]], by_interval: list[dict[str, Any]], path: Path) -> None:
    """Writes the PNG.

    Args:
        by_ranks: rows with `policy`, `ranks`, `useful` and `standard_error`.
        by_interval: rows with `ranks`, `interval_s` and `useful`.
        path: a file that ends in `.png`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    reference, *policies = dict.fromkeys(row["policy"] for row in by_ranks)
    person = {row["ranks"]: row for row in by_ranks if row["policy"] == reference}
    left.axhline(0, color="black", linewidth=1)
    for number, name in enumerate(policies):
        rows = [row for row in by_ranks if row["policy"] == name]
        left.errorbar(
            [row["ranks"] for row in rows],
            [100 * (row["useful"] - person[row["ranks"]]["useful"]) for row in rows],
            yerr=[196 * row["standard_error"] for row in rows],
            color=COLORS[1 + number],
            linewidth=1 + 1.5 * (len(policies) - 1 - number),  # equal results stay visible
            marker="o",
            markersize=4,
            label=name,
        )
    left.set_title("Goodput by policy, less that of a person alone")
    left.set_xlabel("ranks")
    left.set_ylabel("percentage points (bars: 95 %)")
    for number, color in zip(sorted({row["ranks"] for row in by_interval}), COLORS, strict=False):
        rows = [row for row in by_interval if row["ranks"] == number]
        right.plot(
            [row["interval_s"] / 60 for row in rows],
            [100 * row["useful"] for row in rows],
            color=color,
            marker="o",
            markersize=4,
            label=f"{number:,} ranks",
        )
    right.set_title("Goodput under `default` by checkpoint interval")
    right.set_xlabel("minutes between two checkpoints")
    right.set_ylabel("goodput, %")
    for axis, corner in ((left, (0.03, 0.3)), (right, (0.03, 0.03))):
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8, loc=corner)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
