"""Steps of which nothing is known: a kill takes the metrics of half a second, a log has holes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from healcore.tools.report.story import Series, Story

_LEAST = 10
"""Steps, as far apart as rows usually are, that must be missing; a log may skip one or another."""
_MOST = 20
"""Gaps; a log with more of them changes its stride, or has none."""
_TOLD = 5


class Gap(NamedTuple):
    """Between two rows that are known."""

    row: int
    """Place in the curves of the first row after it."""
    low: float
    """Step of the last row before it."""
    high: float
    missing: float
    """How many steps are missing, as far apart as rows usually are."""
    stride: float
    exact: bool
    """The curves are not thinned here: nothing between `low` and `high` is known."""


def gaps(series: Series) -> list[Gap]:
    """Where steps are missing in curves that have nearly all others."""
    if series.lonely or len(series.step) < 3:
        return []
    index = np.arange(len(series.step)) if series.index is None else series.index
    # Thinned curves too: so many rows have been between two that were kept.
    rows, steps = np.diff(index), np.diff(series.step)
    onward = (steps > 0) & (rows > 0) & np.isfinite(steps)
    if not onward.any():
        return []
    stride = float(np.median(steps[onward] / rows[onward]))
    missing = np.where(onward, steps / stride - rows, 0.0)
    found = np.flatnonzero(missing >= _LEAST)
    if len(found) > min(_MOST, len(steps) / 5):
        return []
    return [
        Gap(
            row=i + 1,
            low=float(series.step[i]),
            high=float(series.step[i + 1]),
            missing=float(missing[i]),
            stride=stride,
            exact=bool(rows[i] == 1),
        )
        for i in found.tolist()
    ]


def told(story: Story) -> list[str]:
    """The gaps of a story, in words."""
    what = "no metrics" if story.kind == "run" else "no row"
    lines = []
    for gap in gaps(story.series):
        low, high = gap.low + gap.stride, gap.high - gap.stride
        if gap.exact:
            lines.append(f"{what} for steps {low:.0f}–{high:.0f}: the curves are broken there")
        else:
            lines.append(
                f"{what} for some {gap.missing:.0f} steps between {gap.low:.0f} and {gap.high:.0f}"
            )
    lines = list(dict.fromkeys(lines))  # a stretch that was taken twice may be missing twice
    more = len(lines) - _TOLD
    return lines[:_TOLD] + ([f"{what} at {more} more places"] if more > 0 else [])
