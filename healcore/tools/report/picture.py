"""Draws reports as a PNG: loss, gradient norm and learning rate, with marked incidents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from healcore.extras import require
from healcore.history import Curves, IncidentOutcome, Mode
from healcore.tools.report.run_report import (
    MARKERS,
    MAX_LABELLED,
    RunReport,
    by_severity,
    is_wide,
    place_markers,
    short_names,
)

MAX_REPORTS = 12
"""Limit of runs in a picture."""

_FEW = 4
"""Number of runs up to which runs without an incident are drawn too."""
_MAX_NAME = 50
"""Limit of characters of a name."""
_MODES = {
    Mode.HEAL: "",
    Mode.OBSERVE: "only observed, nothing changed",
    Mode.REPLAY: "replay, nothing changed",
}
_LOSS, _NORM, _THRESHOLD, _RATE = "#0072B2", "#007A5A", "#B3520C", "#6A4FB3"
_UNDONE, _GRID, _QUIET = "#9FB4C3", "#E6E9ED", "#5B6570"
_LINE_STYLE = {"lw": 1.0, "solid_joinstyle": "round"}
_HEIGHT = 5.2
"""Height of a run in inches."""
_OTHER_RUNS = ("#3D3D3D", "#E69F00", "#CC79A7")


class Backdrop(NamedTuple):
    """Curves of other runs and spans of steps, drawn behind a run for comparison."""

    runs: Mapping[str, Curves]
    """Name -> curves of another run. At most three runs are drawn."""
    spans: Sequence[tuple[float, float, str]] = ()
    """First step, last step and name of conditions in all runs."""
    label: str | None = None
    """Name in the legend of the run that the report is about, or None."""


_NO_BACKDROP = Backdrop({})


def select_reports(reports: Sequence[RunReport]) -> list[RunReport]:
    """Returns the reports that a picture shows, by severity."""
    selected = by_severity(reports)
    if len(selected) > _FEW:
        selected = [report for report in selected if report.incidents] or selected
    return selected[:MAX_REPORTS]


def draw(
    reports: Sequence[RunReport],
    path: str | os.PathLike[str],
    *,
    backdrops: Mapping[str, Backdrop] = MappingProxyType({}),
) -> None:
    """Draws runs one below the other into a PNG.

    Args:
        reports: the runs, of which `select_reports` selects the shown runs.
        path: the PNG.
        backdrops: title of a report -> its backdrop.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ValueError: there is no report.
        OSError: the file cannot be written.
    """
    if not reports:
        raise ValueError("a picture needs at least one run")
    require("report", "matplotlib")
    # Agg opens no window. pyplot would use the backend of the user's configuration.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = select_reports(reports)
    # hspace: the default grows with the figure's height.
    layout = ConstrainedLayoutEngine(hspace=0.0)
    figure = Figure(figsize=(12, _HEIGHT * len(shown) + 0.4), layout=layout)
    FigureCanvasAgg(figure)
    blocks = figure.subfigures(len(shown), 1, squeeze=False)[:, 0]
    for block, report, name in zip(blocks, shown, short_names(shown), strict=True):
        _draw_report(block, report, name, backdrops.get(report.title, _NO_BACKDROP))
    if len(reports) > len(shown):
        note = f"The {len(shown)} of {len(reports)} runs with the most incidents; the page has all"
        figure.text(0.995, 0.002, note, ha="right", fontsize=8, color=_QUIET)
    figure.savefig(path, dpi=120, format="png")


def _draw_report(block: Any, report: RunReport, name: str, backdrop: Backdrop) -> None:
    curves = report.curves
    drawn = [("loss", curves.loss, _LOSS, 5.0)]
    if curves.grad_norm is not None and np.isfinite(curves.grad_norm).any():
        drawn.append(("gradient norm", curves.grad_norm, _NORM, 3.0))
    if curves.lr_scale is not None:
        drawn.append(("LR ×", curves.lr_scale, _RATE, 1.3))
    onsets = [incident.onset_step for incident in report.incidents]
    rows, labelled = place_markers(onsets, curves.step, 0.03)
    heights = (0.4 + 0.3 * max(rows) if rows else 0.1, *(share for *_, share in drawn))
    top, *axes = block.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axis, (curve, values, colour, _) in zip(axes, drawn, strict=True):
        others = _draw_other_runs(axis, backdrop, curve)
        label = backdrop.label if curve == "loss" else None
        _draw_curve(axis, curves, values, colour, stepped=curve == "LR ×", label=label)
        axis.set_ylabel(curve, fontsize=9, labelpad=3)
        all_values = np.concatenate((values, *others))
        if curve != "LR ×" and is_wide(all_values):
            _set_log_scale(axis, all_values)
        if curve == "LR ×":
            axis.set_ylim(0, 1.1)
    if curves.threshold is not None and "gradient norm" in (curve for curve, *_ in drawn):
        style = {"color": _THRESHOLD, "ls": "--", "lw": 0.9, "label": "threshold"}
        _draw_line(axes[1], curves, curves.threshold, ~curves.undone(), **style)
    _draw_nonfinite(axes[0], curves)
    _draw_alarms(axes[0], report)
    _draw_incidents(top, axes, report, rows, labelled)
    _draw_spans(axes, backdrop)
    for axis in axes:
        axis.grid(color=_GRID, lw=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8, length=2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step", fontsize=9)
    if not len(curves.step):
        axes[0].text(0.5, 0.5, "no row to draw", transform=axes[0].transAxes, ha="center")
    _draw_titles(block, report, name)
    entries: dict[str, Any] = {}
    for axis in (top, *axes[:2]):
        handles, labels = axis.get_legend_handles_labels()
        entries |= {label: handle for handle, label in zip(handles, labels, strict=True)}
    style = {"ncols": 10, "frameon": False, "fontsize": 8.5, "handlelength": 1.5}
    block.legend(entries.values(), entries.keys(), loc="upper right", **style)


def _draw_other_runs(axis: Any, backdrop: Backdrop, curve: str) -> list[np.ndarray]:
    """Draws and returns a curve of the other runs. A cross marks the end of the finite values."""
    drawn = []
    for (name, series), colour in zip(backdrop.runs.items(), _OTHER_RUNS, strict=False):
        values = series.loss if curve == "loss" else series.grad_norm
        if curve == "LR ×" or values is None:
            continue
        drawn.append(np.where(np.isfinite(values), values, np.nan))
        axis.plot(series.step, drawn[-1], color=colour, lw=1.0, label=name)
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite) and finite[-1] < len(values) - 1:
            axis.plot(series.step[finite[-1]], values[finite[-1]], "X", color=colour, ms=6)
    return drawn


def _draw_spans(axes: Sequence[Any], backdrop: Backdrop) -> None:
    for first, last, name in backdrop.spans:
        for axis in axes:
            axis.axvspan(first - 0.5, last + 0.5, color=_QUIET, alpha=0.13, lw=0)
        position = {"xycoords": axes[0].get_xaxis_transform(), "va": "center", "ha": "center"}
        paper = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1.0}
        middle = ((first + last) / 2, 0.17)  # rarely has a curve
        axes[0].annotate(name, middle, fontsize=8, color=_QUIET, bbox=paper, **position)


def _set_log_scale(axis: Any, values: np.ndarray) -> None:
    """Sets a logarithmic scale, with ticks between the decades if there are few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    finite = values[np.isfinite(values)]
    few = np.log10(finite.max() / finite.min()) < 3
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if few else (1.0,), numticks=8))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _draw_curve(
    axis: Any, curves: Curves, values: np.ndarray, colour: str, *, stepped: bool, label: str | None
) -> None:
    undone = curves.undone()
    style = {**_LINE_STYLE, "drawstyle": "steps-post"} if stepped else _LINE_STYLE
    attempts = [] if curves.attempt is None else np.unique(curves.attempt[undone]).tolist()
    for i, attempt in enumerate(attempts):
        rows = undone & (curves.attempt == attempt)
        legend = None if i else "undone"
        _draw_line(axis, curves, values, rows, color=_UNDONE, label=legend, **style)
    _draw_line(axis, curves, values, ~undone, color=colour, label=label, **style)


def _draw_line(
    axis: Any, curves: Curves, values: np.ndarray, where: np.ndarray, **style: Any
) -> None:
    """Draws a line through the rows in `where` that have a value. NaN and Inf make a gap."""
    nonfinite = False if curves.nonfinite is None else curves.nonfinite
    rows = np.flatnonzero(where & (np.isfinite(values) | nonfinite))
    if curves.isolated:
        style = {**style, "ls": "none", "marker": ".", "ms": 4}
    step = curves.step[rows]
    y = np.where(np.isfinite(values[rows]), values[rows], np.nan)
    for gap in curves.gaps():
        i = int(np.searchsorted(step, gap.high))
        if 0 < i < len(step) and step[i - 1] <= gap.low and rows[i - 1] < gap.row <= rows[i]:
            step, y = np.insert(step, i, step[i]), np.insert(y, i, np.nan)
            rows = np.insert(rows, i, rows[i])
    axis.plot(step, y, **style)


def _draw_nonfinite(axis: Any, curves: Curves) -> None:
    if curves.nonfinite is None or not curves.nonfinite.any():
        return
    steps = curves.step[curves.nonfinite]
    marks = {"transform": axis.get_xaxis_transform(), "color": "#A3210F", "clip_on": False}
    axis.plot(steps, np.full(len(steps), 0.97), "x", ms=4, mew=1.0, label="NaN or Inf", **marks)


def _draw_alarms(axis: Any, report: RunReport) -> None:
    """Draws a tick for each alarm outside of incidents."""
    steps = [mark.step for mark in report.marks if mark.kind == "alarm"]
    if steps:
        style = {"transform": axis.get_xaxis_transform(), "color": _QUIET, "ms": 7}
        axis.plot(steps, np.full(len(steps), 0.03), "|", label="alarm", **style)


def _draw_incidents(
    top: Any, axes: Sequence[Any], report: RunReport, rows: Sequence[int], labelled: Sequence[bool]
) -> None:
    top.set_ylim(-0.8, max(rows, default=0) + 0.8)
    top.axis("off")
    incidents = report.incidents
    drawn: set[tuple[float, float]] = set()  # equal bands are drawn once
    in_legend: set[IncidentOutcome] = set()
    for i, (incident, row) in enumerate(zip(incidents, rows, strict=True)):
        marker, band = MARKERS[incident.outcome], (incident.onset_step, incident.end[0])
        for axis in axes if band not in drawn else ():
            axis.axvspan(*band, color=marker.colour, alpha=0.13, lw=0)
            axis.axvline(band[0], color=marker.colour, lw=1.0, alpha=0.8)
        drawn.add(band)
        stop = report.stop_after_rollback(i)
        marks = [(marker, band[0], float(row))]
        if stop is not None:  # lower, so that both marks are visible
            marks.append((MARKERS[IncidentOutcome.STOP], stop[0], row - 0.45))
        for mark, step, y in marks:
            label = None if mark.outcome in in_legend else mark.label(report.would)
            in_legend.add(mark.outcome)
            top.plot(step, y, mark.matplotlib, color=mark.colour, ms=6, label=label, ls="none")
        if incident.number and len(incidents) <= MAX_LABELLED and labelled[i]:
            offset = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
            top.annotate(
                f"#{incident.number}", (band[0], row), color=marker.colour, fontsize=7.5, **offset
            )
        if incident.checkpoint is not None:
            top.plot([incident.checkpoint, band[0]], [row, row], ":", color=marker.colour, lw=1)


def _ending(report: RunReport) -> str:
    ending = report.ending()
    return f"would stop at {ending}" if report.mode is Mode.REPLAY and ending else ending


def _draw_titles(block: Any, report: RunReport, name: str) -> None:
    parts = [_MODES[report.mode], _ending(report), *report.outcomes(), report.fingerprint]
    parts += report.gaps()[:2]
    # matplotlib typesets text between dollar signs as a formula.
    title = f"{_shorten(name)} · {_shorten(report.policy_name)}".replace("$", r"\$")
    block.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold")
    facts = " · ".join(filter(None, parts)).replace("$", r"\$")
    block.supxlabel(facts, x=0.01, ha="left", fontsize=8.5, color=_QUIET)


def _shorten(name: str) -> str:
    """Removes the middle of a long name, which would overlap the legend."""
    half = _MAX_NAME // 2
    return name if len(name) <= _MAX_NAME else f"{name[:half]}…{name[-half:]}"
