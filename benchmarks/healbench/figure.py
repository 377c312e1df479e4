"""One picture: how far each arm is from its reference, task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.healbench.comparing import LEVEL, MARGIN, REFERENCES, Cell

EDGE = 300.0
"""Percent at which the axis ends; what is beyond is an arrow at the edge."""
LINEAR = 2.0
"""Percent up to which the axis is linear."""
LANE = 0.085
"""Inches between two arms of a task."""
TICKS = (-100, -30, -10, -5, -2, 0, 2, 5, 10, 30, 100)
OURS = ("#0b6e4f", "#d1495b", "#2e5eaa", "#c98a1b", "#8d5a97", "#3a9ea5")
OTHERS = "#8c8c8c"
SHAPES = "osD^vP*Xhp"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Writes the PNG: a task is a row, healthy ones above, and each arm a marker with its interval.

    Args:
        cells: of `compare`.
        path: a file that ends in `.png`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [c for c in cells if c.arm != c.reference and not math.isnan(c.difference.percent)]
    styles = _styles([cell for cell in cells if cell.arm in {each.arm for each in shown}])
    lanes = max((style["lane"] for style in styles.values()), default=0) + 1
    rows = {
        kind: list(dict.fromkeys(c.name for c in cells if c.kind == kind)) for kind in REFERENCES
    }
    rows = {kind: names for kind, names in rows.items() if names}
    inches = LANE * (lanes + 2)
    figure = Figure((10, 1.8 + inches * sum(map(len, rows.values()))), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(names) for names in rows.values()]
    axes = figure.subplots(len(rows), height_ratios=heights, sharex=True, squeeze=False)[:, 0]
    for axis, (kind, names) in zip(axes, rows.items(), strict=True):
        _prepare(axis, kind, names)
        for cell in shown:
            if cell.kind == kind:
                style = styles[cell.arm]
                offset = (style["lane"] - (lanes - 1) / 2) / (lanes + 2)
                _mark(axis, cell.difference, names.index(cell.name) + offset, style)
    axes[-1].set_xlabel(
        f"final metric against the reference arm, % (right is worse); "
        f"bars: {100 - 200 * LEVEL:g} % intervals"
    )
    keys = [axes[0].plot([], [], **_look(style), label=arm)[0] for arm, style in styles.items()]
    if keys:
        figure.legend(handles=keys, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)


def _styles(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Colours and a lane each for healcore's arms; grey and the lane above for the others."""
    arms = dict.fromkeys(cell.arm for cell in cells)
    ours = [arm for arm in arms if any(cell.policy for cell in cells if cell.arm == arm)]
    styles = {}
    for number, arm in enumerate(arm for arm in arms if arm not in ours):
        shape = SHAPES[number % len(SHAPES)]
        styles[arm] = {"lane": 0, "color": OTHERS, "marker": shape, "fill": "white", "order": 2}
    first = 1 if styles else 0
    for number, arm in enumerate(ours):
        color = OURS[number % len(OURS)]
        lane = first + number
        styles[arm] = {"lane": lane, "color": color, "marker": "o", "fill": color, "order": 3}
    return styles


def _look(style: dict[str, Any]) -> dict[str, Any]:
    return {
        "color": style["color"],
        "marker": style["marker"],
        "markerfacecolor": style["fill"],
        "markersize": 4.5,
        "linestyle": "none",
        "zorder": style["order"],
    }


def _prepare(axis: Any, kind: str, names: list[str]) -> None:
    axis.set_xscale("symlog", linthresh=LINEAR, linscale=0.9)
    axis.set_xlim(-EDGE, EDGE)
    axis.set_xticks(TICKS, [f"{tick:+d}" if tick else "0" for tick in TICKS], minor=False)
    axis.minorticks_off()
    axis.tick_params(labelbottom=True, top=True, labeltop=True, length=3)
    axis.grid(axis="x", color="#e2e2e2", linewidth=0.6, zorder=0.6)
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_ylim(len(names) - 0.5, -0.5)
    for row in range(0, len(names), 2):
        axis.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", zorder=0)
    axis.axvspan(-MARGIN, MARGIN, color="#cfe5d8", alpha=0.5, zorder=0.5)
    axis.axvline(0, color="black", linewidth=0.8, zorder=1)
    references = " and ".join(REFERENCES[kind])
    better = "the better of " if len(REFERENCES[kind]) > 1 else ""
    axis.set_title(f"{kind} tasks, against {better}{references}", loc="left", fontsize=10)


def _mark(axis: Any, difference: Any, height: float, style: dict[str, Any]) -> None:
    """A marker with its interval; an arrow at the edge for what lies beyond it."""
    at, low, high = (
        max(-EDGE, min(EDGE, value))
        for value in (difference.percent, difference.low, difference.high)
    )
    if not math.isnan(difference.low):
        pale = style["lane"] == 0 and style["fill"] == "white"
        width = 0.6 if pale else 1.2
        axis.hlines(
            height, low, high, color=style["color"], linewidth=width, zorder=style["order"] - 0.5
        )
    look = _look(style)
    if abs(at) >= EDGE:
        look |= {"marker": ">" if at > 0 else "<", "markersize": 6, "clip_on": False}
    axis.plot([at], [height], **look)
