"""Draws the curves of a report as a PNG: loss, gradient norm and learning rate, with incidents."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from healcore.history import Curves
from healcore.tools.report.run_report import MARKERS, RunReport

_MAX_BANDS = 300
"""Limit of incidents drawn in a run."""
_LOSS, _NORM, _THRESHOLD, _RATE = "#0072B2", "#007A5A", "#B3520C", "#6A4FB3"
_UNDONE, _GRID, _QUIET, _BAD = "#9FB4C3", "#E6E9ED", "#5B6570", "#A3210F"


def draw(report: RunReport) -> bytes:
    """Draws a run, or raises ImportError without matplotlib."""
    # Agg opens no window. pyplot would use the backend of the user's configuration.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    curves = report.curves
    drawn = [("loss", curves.loss, _LOSS, 5.0)]
    if curves.grad_norm is not None:
        drawn.append(("gradient norm", curves.grad_norm, _NORM, 3.0))
    if curves.lr_scale is not None:
        drawn.append(("LR ×", curves.lr_scale, _RATE, 1.3))
    heights = [share for *_, share in drawn]
    axes = figure.subplots(len(drawn), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (curve, values, colour, _) in zip(axes, drawn, strict=True):
        undone = curves.undone()
        _draw_line(axis, curves, values, undone, color=_UNDONE)
        _draw_line(axis, curves, values, ~undone, color=colour)
        if curve == "gradient norm" and curves.threshold is not None:
            style = {"color": _THRESHOLD, "ls": "--", "label": "threshold"}
            _draw_line(axis, curves, curves.threshold, ~undone, **style)
        if _is_wide(values):
            axis.set_yscale("log")
        axis.set_ylabel(curve, fontsize=9)
        axis.grid(color=_GRID, lw=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, length=2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step", fontsize=9)
    edge = {"transform": axes[0].get_xaxis_transform(), "clip_on": False, "ls": "none"}
    if curves.nonfinite is not None and curves.nonfinite.any():
        steps = curves.step[curves.nonfinite]
        _mark(axes[0], steps, 0.97, "x", color=_BAD, ms=4, label="NaN or Inf", **edge)
    _mark(axes[0], report.alarms_outside, 0.03, "|", color=_QUIET, ms=7, label="alarm", **edge)
    _draw_incidents(axes, report, edge)
    entries: dict[str, Any] = {}
    for axis in axes[:2]:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    style = {"ncols": 10, "frameon": False, "fontsize": 8.5, "loc": "outside upper right"}
    figure.legend(entries.values(), entries.keys(), **style)
    file = io.BytesIO()
    figure.savefig(file, dpi=120, format="png")
    return file.getvalue()


def _draw_incidents(axes: Any, report: RunReport, edge: dict[str, Any]) -> None:
    """Draws a band from each onset to the last alarm, and a marker above the loss."""
    for kind, marker in reversed(MARKERS.items()):  # the most severe on top
        incidents = [each for each in report.incidents if each.outcome is kind][:_MAX_BANDS]
        for incident in incidents:
            for axis in axes:
                axis.axvspan(incident.onset_step, incident.end, color=marker.colour, alpha=0.13)
            if incident.checkpoint is not None:
                back = [incident.checkpoint, incident.onset_step]
                style = {"transform": edge["transform"], "clip_on": False, "lw": 1}
                axes[0].plot(back, [1.03, 1.03], ":", color=marker.colour, **style)
        onsets = [incident.onset_step for incident in incidents]
        label = report.outcome_text(kind)
        _mark(axes[0], onsets, 1.03, marker.shape, color=marker.colour, ms=6, label=label, **edge)


def _mark(axis: Any, steps: Any, height: float, shape: str, **style: Any) -> None:
    """Draws a mark at each step, at a fraction of the axis' height."""
    if len(steps):
        axis.plot(steps, np.full(len(steps), height), marker=shape, **style)


def _draw_line(
    axis: Any, curves: Curves, values: np.ndarray, where: np.ndarray, **style: Any
) -> None:
    """Draws a line through the rows in `where` that have a value. NaN and Inf make a gap."""
    logged = np.isfinite(values)
    y = np.where(where & logged, values, np.nan)
    if curves.nonfinite is not None:
        logged = logged | curves.nonfinite
    if np.isfinite(y).any():
        axis.plot(curves.step[logged], y[logged], **{"lw": 1.0, **style})


def _is_wide(values: np.ndarray) -> bool:
    """Whether values need a logarithmic axis: all are positive, and their ratio exceeds 30."""
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() / 30 > finite.min())
