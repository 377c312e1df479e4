"""Draws the report as a PNG: loss, gradient norm and learning rate, with marked incidents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from healcore.extras import require
from healcore.history import Curves, IncidentOutcome, Mode
from healcore.tools.report.run_report import (
    LABELLED,
    MARKERS,
    RunReport,
    by_severity,
    is_wide,
    lane,
    short_names,
)

REPORTS = 12
"""Most runs in a picture."""

_FEW = 4
"""Up to this number of runs, runs without an incident are drawn too."""
_NAME = 50
_MODES = {
    Mode.HEAL: "",
    Mode.OBSERVE: "observed, nothing was done",
    Mode.REPLAY: "replay, nothing was done",
}
_LOSS, _NORM, _THRESHOLD, _RATE = "#0072B2", "#007A5A", "#B3520C", "#6A4FB3"
_UNDONE, _GRID, _QUIET = "#9FB4C3", "#E6E9ED", "#5B6570"
_KEPT = {"lw": 1.0, "solid_joinstyle": "round"}
_SIZE = 5.2
_OTHERS = ("#3D3D3D", "#E69F00", "#CC79A7")


class Backdrop(NamedTuple):
    """Curves and spans drawn behind a run, for comparison."""

    runs: Mapping[str, Curves]
    """Name -> curves of another run; at most three runs."""
    spans: Sequence[tuple[float, float, str]] = ()
    """First step, last step and name of conditions that all runs share."""
    itself: str | None = None
    """Name of the run itself in the legend."""


_NOTHING = Backdrop({})


def chosen(reports: Sequence[RunReport]) -> list[RunReport]:
    """The runs that a picture shows, by severity."""
    shown = by_severity(reports)
    if len(shown) > _FEW:
        shown = [report for report in shown if report.incidents] or shown
    return shown[:REPORTS]


def draw(
    reports: Sequence[RunReport],
    path: str | os.PathLike[str],
    *,
    behind: Mapping[str, Backdrop] = MappingProxyType({}),
) -> None:
    """Draws the runs one below the other into a PNG, as `chosen` selects them.

    `behind` is title -> backdrop. Raises MissingExtraError without matplotlib, ValueError without a
    run, OSError if the file cannot be written.
    """
    if not reports:
        raise ValueError("a picture needs at least one run")
    require("report", "matplotlib")
    # Agg opens no window; pyplot would use the backend that the user has configured.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = chosen(reports)
    # The default hspace is a fraction of the figure's height, too much in a high figure.
    layout = ConstrainedLayoutEngine(hspace=0.0)
    figure = Figure(figsize=(12, _SIZE * len(shown) + 0.4), layout=layout)
    FigureCanvasAgg(figure)
    blocks = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for block, report, name in zip(blocks, shown, short_names(shown), strict=True):
        _report(block, report, name, behind.get(report.title, _NOTHING))
    if len(reports) > len(shown):
        note = f"The {len(shown)} of {len(reports)} in which most happened; the page has the others"
        figure.text(0.995, 0.002, note, ha="right", fontsize=8, color=_QUIET)
    figure.savefig(path, dpi=120, format="png")


def _report(block: Any, report: RunReport, name: str, behind: Backdrop) -> None:
    curves = report.curves
    drawn = [("loss", curves.loss, _LOSS, 5.0)]
    if curves.grad_norm is not None and np.isfinite(curves.grad_norm).any():
        drawn.append(("gradient norm", curves.grad_norm, _NORM, 3.0))
    if curves.lr_scale is not None:
        drawn.append(("LR ×", curves.lr_scale, _RATE, 1.3))
    rows, free = lane([each.onset_step for each in report.incidents], curves.step, 0.03)
    heights = (0.4 + 0.3 * max(rows) if rows else 0.1, *(share for *_, share in drawn))
    top, *axes = block.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axis, (curve, values, colour, _) in zip(axes, drawn, strict=True):
        others = _others(axis, behind, curve)
        label = behind.itself if curve == "loss" else None
        _curve(axis, curves, values, colour, stepped=curve == "LR ×", label=label)
        axis.set_ylabel(curve, fontsize=9, labelpad=3)
        whole = np.concatenate((values, *others))
        if curve != "LR ×" and is_wide(whole):
            _logarithmic(axis, whole)
        if curve == "LR ×":
            axis.set_ylim(0, 1.1)
    if curves.threshold is not None and "gradient norm" in (curve for curve, *_ in drawn):
        style = {"color": _THRESHOLD, "ls": "--", "lw": 0.9, "label": "threshold"}
        _line(axes[1], curves, curves.threshold, ~curves.undone(), **style)
    _bad(axes[0], curves)
    _incidents(top, axes, report, rows, free)
    _spans(axes, behind)
    for axis in axes:
        axis.grid(color=_GRID, lw=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, length=2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step", fontsize=9)
    if not len(curves.step):
        axes[0].text(0.5, 0.5, "no row to draw", transform=axes[0].transAxes, ha="center")
    _titles(block, report, name)
    found: dict[str, Any] = {}
    for axis in (top, *axes[:2]):
        handles, labels = axis.get_legend_handles_labels()
        found |= {label: handle for handle, label in zip(handles, labels, strict=True)}
    style = {"ncols": 10, "frameon": False, "fontsize": 8.5, "handlelength": 1.5}
    block.legend(found.values(), found.keys(), loc="upper right", **style)


def _others(axis: Any, behind: Backdrop, curve: str) -> list[np.ndarray]:
    """Draws the other runs. A cross marks the last finite value of a run that continues."""
    found = []
    for (name, series), colour in zip(behind.runs.items(), _OTHERS, strict=False):
        values = series.loss if curve == "loss" else series.grad_norm
        if curve == "LR ×" or values is None:
            continue
        found.append(np.where(np.isfinite(values), values, np.nan))
        axis.plot(series.step, found[-1], color=colour, lw=1.0, label=name)
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite) and finite[-1] < len(values) - 1:
            axis.plot(series.step[finite[-1]], values[finite[-1]], "X", color=colour, ms=6)
    return found


def _spans(axes: Sequence[Any], behind: Backdrop) -> None:
    for first, last, what in behind.spans:
        for axis in axes:
            axis.axvspan(first - 0.5, last + 0.5, color=_QUIET, alpha=0.13, lw=0)
        place = {"xycoords": axes[0].get_xaxis_transform(), "va": "center", "ha": "center"}
        paper = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1.0}
        middle = ((first + last) / 2, 0.17)  # usually free of curves
        axes[0].annotate(what, middle, fontsize=8, color=_QUIET, bbox=paper, **place)


def _logarithmic(axis: Any, values: np.ndarray) -> None:
    """Sets a logarithmic axis, with ticks between the decades if there are few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    finite = values[np.isfinite(values)]
    few = np.log10(finite.max() / finite.min()) < 3
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if few else (1.0,), numticks=8))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _curve(
    axis: Any,
    curves: Curves,
    values: np.ndarray,
    colour: str,
    *,
    stepped: bool,
    label: str | None,
) -> None:
    undone = curves.undone()
    style = {**_KEPT, "drawstyle": "steps-post"} if stepped else _KEPT
    attempts = [] if curves.attempt is None else np.unique(curves.attempt[undone]).tolist()
    for i, attempt in enumerate(attempts):
        where = undone & (curves.attempt == attempt)
        named = None if i else "undone"
        _line(axis, curves, values, where, color=_UNDONE, label=named, **style)
    _line(axis, curves, values, ~undone, color=colour, label=label, **style)


def _line(axis: Any, curves: Curves, values: np.ndarray, where: np.ndarray, **style: Any) -> None:
    """Skips rows without a value. A value that is not finite makes a gap."""
    bad = np.zeros(len(values), bool) if curves.nonfinite is None else curves.nonfinite
    rows = np.flatnonzero(where & (np.isfinite(values) | bad))
    if curves.isolated:
        style = {**style, "ls": "none", "marker": ".", "ms": 4}
    step = curves.step[rows]
    kept = np.where(np.isfinite(values[rows]), values[rows], np.nan)
    for gap in curves.gaps():
        at = int(np.searchsorted(step, gap.high))
        if 0 < at < len(step) and step[at - 1] <= gap.low and rows[at - 1] < gap.row <= rows[at]:
            step, kept = np.insert(step, at, step[at]), np.insert(kept, at, np.nan)
            rows = np.insert(rows, at, rows[at])
    axis.plot(step, kept, **style)


def _bad(axis: Any, curves: Curves) -> None:
    if curves.nonfinite is None or not curves.nonfinite.any():
        return
    at = curves.step[curves.nonfinite]
    marks = {"transform": axis.get_xaxis_transform(), "color": "#A3210F", "clip_on": False}
    axis.plot(at, np.full(len(at), 0.97), "x", ms=4, mew=1.0, label="NaN or Inf", **marks)


def _incidents(
    top: Any, axes: Sequence[Any], report: RunReport, rows: Sequence[int], free: Sequence[bool]
) -> None:
    top.set_ylim(-0.8, max(rows, default=0) + 0.8)
    top.axis("off")
    incidents = report.incidents
    drawn: set[tuple[float, float]] = set()  # equal bands, drawn once
    used: set[IncidentOutcome] = set()
    for place, (incident, row) in enumerate(zip(incidents, rows, strict=True)):
        marker, at = MARKERS[incident.outcome], (incident.onset_step, incident.end[0])
        for axis in axes if at not in drawn else ():
            axis.axvspan(*at, color=marker.colour, alpha=0.13, lw=0)
            axis.axvline(at[0], color=marker.colour, lw=1.0, alpha=0.8)
        drawn.add(at)
        stop = report.stop_after_rollback(place)
        marks = [(marker, at[0], float(row))]
        if stop is not None:  # a little lower, so that both marks are visible
            marks.append((MARKERS[IncidentOutcome.STOP], stop[0], row - 0.45))
        for mark, step, y in marks:
            label = None if mark.outcome in used else mark.label(report.would)
            used.add(mark.outcome)
            top.plot(step, y, mark.matplotlib, color=mark.colour, ms=6, label=label, ls="none")
        if len(incidents) <= LABELLED and free[place]:
            offset = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            top.annotate(
                f"#{incident.number}", (at[0], row), color=marker.colour, fontsize=7.5, **offset
            )
        if incident.checkpoint is not None:
            top.plot([incident.checkpoint, at[0]], [row, row], ":", color=marker.colour, lw=1)


def _ending(report: RunReport) -> str:
    ends = report.ending()
    return f"would stop at {ends}" if report.mode is Mode.REPLAY and ends else ends


def _titles(block: Any, report: RunReport, name: str) -> None:
    parts = [_MODES[report.mode], _ending(report), *report.outcomes(), report.fingerprint]
    parts += report.gaps()[:2]
    # matplotlib typesets text between dollars as a formula.
    title = f"{_short(name)} · {_short(report.policy_name)}".replace("$", r"\$")
    block.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
    block.supxlabel(
        " · ".join(each for each in parts if each).replace("$", r"\$"),
        x=0.01,
        ha="left",
        fontsize=8.5,
        color=_QUIET,
    )


def _short(name: str) -> str:
    """Cuts the middle of a long name, which would overlap the legend."""
    half = _NAME // 2
    return name if len(name) <= _NAME else f"{name[:half]}…{name[-half:]}"
