"""Three pictures: gain in goodput by ranks, needless rollbacks, and cost of forward passes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

COLORS = ("#0b6e4f", "#2e5eaa", "#d1495b", "#c98a1b", "#8d5a97")


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the PNG.

    Args:
        result: of `python -m benchmarks.goodput`.
        path: a file that ends in `.png`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    by_ranks, needless, passes = figure.subplots(1, 3)
    passes.sharey(needless)
    reference, *policies = dict.fromkeys(row["policy"] for row in result["by_ranks"])
    person = {row["ranks"]: row for row in result["by_ranks"] if row["policy"] == reference}
    for color, name in zip(COLORS, policies, strict=False):
        rows = [row for row in result["by_ranks"] if row["policy"] == name]
        pairs = [(row["ranks"], row, person[row["ranks"]]) for row in rows]
        _line(by_ranks, pairs, color, name.replace("`", ""))
    by_ranks.set_xscale("log")
    by_ranks.set_title("By policy")
    by_ranks.set_xlabel("ranks")
    by_ranks.set_ylabel("points of goodput above a person (bars: 95 %)")
    varied = result["varied"]
    person_s = result["options"]["person_s"]
    base = next(r for r in varied if r["varied"] == "person" and r["person_s"] == person_s)
    for axis, kind, key, factor in (
        (needless, "needless", "needless_per_step", 1e4),
        (passes, "passes", "pass_share", 1.0),
    ):
        rows = [row for row in varied if row["varied"] == kind]
        for color, missed in zip(COLORS, dict.fromkeys(r["missed"] for r in rows), strict=False):
            pairs = [(factor * r[key], r, base) for r in rows if r["missed"] == missed]
            _line(axis, pairs, color, f"{missed:.0%} of damages missed")
    needless.set_xscale("symlog", linthresh=0.01)
    needless.set_xlim(left=0)
    ranks = base["ranks"]
    needless.set_title(f"default, loss_fn, stationary: {ranks:,} ranks")
    needless.set_xlabel("needless rollbacks per 10,000 steps")
    passes.set_title(f"default, loss_fn, stationary: {ranks:,} ranks")
    passes.set_xlabel("cost of a forward pass, in steps")
    for axis in (by_ranks, needless, passes):
        axis.axhline(0, color="black", linewidth=1)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def _line(axis: Any, pairs: list[tuple[float, Any, Any]], color: str, label: str) -> None:
    """Mean differences of paired runs, with their 95 % intervals."""
    points = []
    for x, row, base in pairs:
        each = [100 * (a - b) for a, b in zip(row["each"], base["each"], strict=True)]
        points.append((x, statistics.fmean(each), 1.96 * statistics.stdev(each) / len(each) ** 0.5))
    xs, ys, errors = zip(*points, strict=True)
    axis.errorbar(xs, ys, yerr=errors, color=color, marker="o", markersize=4, label=label)
