"""What the page's script draws, as plain JSON: short, strict, and safe within a script element."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from healcore.history import Incident
from healcore.tools.report import words
from healcore.tools.report.marks import SIGNS, is_wide, labels, levels, stop_of
from healcore.tools.report.report import RunReport

LANE = 4
"""Rows of the lane above the curves, in which the incidents are marked."""
_LABELLED = 60
"""Incidents up to which each has its number beside the mark."""


def plot_data(report: RunReport) -> dict[str, Any]:
    """Everything that the plot of a run shows."""
    curves = report.curves
    step = curves.step
    width = float(step.max() - step.min()) if len(step) else 1.0
    places = [case.onset_step for case in report.incidents]
    room = max(width, 1.0) * 0.035
    rows = levels(places, room, LANE)
    free = labels(places, rows, room)
    return {
        "step": _numbers(step),
        "index": None if curves.index is None else curves.index.tolist(),
        "undone": curves.undone().astype(int).tolist(),
        "attempt": None if curves.attempt is None else curves.attempt.tolist(),
        "loss": _curve(curves.loss),
        "norm": _curve(curves.grad_norm),
        "threshold": _curve(curves.threshold),
        "lr": _curve(curves.lr_scale),
        "bad": []
        if curves.nonfinite is None
        else [int(i) for i in np.flatnonzero(curves.nonfinite)],
        "gaps": [{"row": gap.row, "low": gap.low, "high": gap.high} for gap in curves.gaps()],
        "isolated": curves.isolated,
        "would": report.would,
        "logLoss": is_wide(curves.loss),
        "logNorm": is_wide(curves.grad_norm),
        "labelled": len(report.incidents) <= _LABELLED,
        "incidents": [
            {**_incident(case, rows[place], stop_of(report, place)), "label": free[place]}
            for place, case in enumerate(report.incidents)
        ],
        "marks": [
            {"x": mark.step, "kind": mark.kind, "text": _html(words.mark(mark))}
            for mark in report.marks
        ],
    }


def signs() -> dict[str, dict[str, str]]:
    """The kinds of incidents, for the script."""
    return {
        sign.outcome: {"words": sign.words, "would": sign.would, "symbol": sign.plotly}
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
        "kind": case.outcome,
        "x": [case.onset_step, step],
        "i": None if case.onset < 0 or index < 0 else [case.onset, index],
        "stop": None if stop is None else [stop[0], None if stop[1] < 0 else stop[1]],
        "to": case.checkpoint,
        "row": row,
        "text": f"<b>#{case.number}</b> step {words.steps(case.onset_step, step)}: "
        f"{_html(words.words(case.cause))}<br>{_html(words.outcome(case))}",
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
