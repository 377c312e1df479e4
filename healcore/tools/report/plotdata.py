"""What the page's script draws, as plain JSON: short, strict, and safe within a script element."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from healcore.tools.report.gaps import gaps
from healcore.tools.report.marking import SIGNS, is_wide, kind_of, labels, levels, stop_of
from healcore.tools.report.sound import words
from healcore.tools.report.story import Incident, Story
from healcore.tools.report.table import span

LANE = 4
"""Rows of the lane above the curves, in which the incidents are marked."""
_LABELLED = 60
"""Incidents up to which each has its number beside the mark."""
_MARKED = frozenset({"resume", "stop", "end", "hook", "order", "alarm"})


def plot_data(story: Story) -> dict[str, Any]:
    """Everything that the plot of a story shows."""
    series = story.series
    step = series.step
    width = float(step.max() - step.min()) if len(step) else 1.0
    places = [case.onset_step for case in story.incidents]
    room = max(width, 1.0) * 0.035
    rows = levels(places, room, LANE)
    free = labels(places, rows, room)
    return {
        "step": _numbers(step),
        "index": None if series.index is None else series.index.tolist(),
        "undone": series.undone().astype(int).tolist(),
        "attempt": None if series.attempt is None else series.attempt.tolist(),
        "loss": _curve(series.loss),
        "norm": _curve(series.grad_norm),
        "threshold": _curve(series.threshold),
        "lr": _curve(series.lr_scale),
        "bad": []
        if series.nonfinite is None
        else [int(i) for i in np.flatnonzero(series.nonfinite)],
        "gaps": [{"row": gap.row, "low": gap.low, "high": gap.high} for gap in gaps(series)],
        "lonely": series.lonely,
        "would": story.would,
        "logLoss": is_wide(series.loss),
        "logNorm": is_wide(series.grad_norm),
        "labelled": len(story.incidents) <= _LABELLED,
        "incidents": [
            {**_incident(case, rows[place], stop_of(story, place)), "label": free[place]}
            for place, case in enumerate(story.incidents)
        ],
        "marks": [
            {"x": mark.step, "kind": mark.kind, "text": _html(mark.text)}
            for mark in story.marks
            if mark.kind in _MARKED
        ],
    }


def signs() -> dict[str, dict[str, str]]:
    """The kinds of incidents, for the script."""
    return {
        sign.name: {"words": sign.words, "would": sign.would, "symbol": sign.plotly}
        for sign in SIGNS.values()
    }


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _incident(case: Incident, row: int, stop: tuple[float, int] | None) -> dict[str, Any]:
    step, index = case.end
    return {
        "n": case.number,
        "kind": kind_of(case),
        "x": [case.onset_step, step],
        "i": None if case.onset < 0 or index < 0 else [case.onset, index],
        "stop": None if stop is None else [stop[0], None if stop[1] < 0 else stop[1]],
        "to": case.checkpoint,
        "row": row,
        "text": f"<b>#{case.number}</b> step {span(case.onset_step, step)}: "
        f"{_html(words(case.cause))}<br>{_html(case.outcome)}",
    }


def _html(text: str) -> str:
    """Plotly's labels know a few tags of HTML."""
    short = text if len(text) <= 300 else f"{text[:297]}..."
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _numbers(values: np.ndarray) -> list[float | int | None]:
    return [_number(x) for x in values.tolist()]


def _number(x: float) -> float | int | None:
    """Six digits, whole numbers whole, and null for what is not finite: JSON has no other."""
    if not np.isfinite(x):
        return None
    return int(x) if x == int(x) and abs(x) < 2**53 else float(f"{x:.6g}")


def _curve(values: np.ndarray | None) -> list[float | int | None] | None:
    if values is None or not np.any(np.isfinite(values)):
        return None
    return _numbers(values)
