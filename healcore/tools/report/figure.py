"""Draws a run as one SVG figure: a timeline of what happened, above the curves of the run."""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.console import counted
from healcore.events.kinds import flags_text
from healcore.events.models import EventRecord
from healcore.history import Curves, Incident
from healcore.tools.report.page_report import PageReport, skipped_text

WIDTHS = {"screen": 11.5, "phone": 4.4}
"""Kind of a figure -> its width in inches."""
_DARK = {"#ffffff": "#14181d", "#1c2024": "#e6e9ed", "#5b6570": "#a9b4bf"}
_DARK |= {"#e6e9ee": "#353c44", "#0072b2": "#5cb8f0", "#007a5a": "#43c59e"}
_DARK |= {"#6a4fb3": "#b7a3f5", "#d98200": "#ffb547", "#a3210f": "#ff8a75"}
"""Colour -> the same colour on a dark page; safe for colour-blind readers."""
_PAGE, _TEXT, _QUIET, _GRID, _LOSS, _NORM, _RATE, _UNDONE, _BAD = _DARK
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False, "axes.facecolor": "none"}
STYLE |= {"figure.facecolor": _PAGE, "font.size": 9.0, "text.color": _TEXT}
STYLE |= dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _QUIET)
"""Settings of matplotlib for `to_svg`."""
_MARGINS = 1.0
"""Inches to the left and right of the axes."""
_CHARACTER_WIDTH = 0.07
"""Width of a character in inches."""
_LOG_AXIS_RATIO = 30.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_MAX_MARKS = 300
"""Limit of events of one kind."""
_MAX_ROWS = 5
"""Limit of rows with text for events of one kind."""


class _Mark(NamedTuple):
    """An event on the timeline."""

    first: float
    last: float
    text: str
    colour: str
    to: float | None = None
    """Step from which the run continued."""


def draw(report: PageReport, width: float) -> str:
    """Draws a run as an SVG element.

    The style sheet in the element follows the reader's light or dark setting. Equal reports give
    equal bytes.

    Args:
        report: a report whose curves have at least one step.
        width: inches; `WIDTHS` has the widths of the page.

    Returns:
        The text from `<svg` on, which fits into an HTML page.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": f"{report.title} {width}"}):
        figure = Figure()
        plot(figure, report, width)
        return to_svg(figure)


def to_svg(figure: Any) -> str:
    """Converts a figure of matplotlib to an SVG element.

    Args:
        figure: a `matplotlib.figure.Figure`, drawn with the settings `STYLE`.

    Returns:
        The text from `<svg` on. Each colour of `STYLE` is a CSS variable, which a style sheet sets
        for a dark page.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=metadata)
    svg = file.getvalue().partition("<svg")[2]
    svg = re.sub(r"; font-family: [^;\"]*", "; font-family: system-ui, sans-serif", svg)
    svg = re.sub(": #([0-9a-f]{6})", r": var(--c\1, #\1)", svg)
    dark = ";".join(f"--c{colour[1:]}:{value}" for colour, value in _DARK.items())
    rules = f"<style>@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return "<svg" + svg.replace('<style type="text/css">', rules, 1)


def plot(figure: Any, report: PageReport, width: float) -> None:
    """Draws a run into a figure: the timeline, and below it a panel for each curve.

    Args:
        figure: an empty `matplotlib.figure.Figure`, whose size is set here.
        report: the run. A report without curves gets the timeline and an empty panel.
        width: inches. The height follows from the rows of the timeline and the panels.
    """
    curves = report.curves
    panels = _panels(report)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1 + len(panels), sharex=True)
    steps = curves.step
    if not len(steps):
        steps = np.zeros(1)
    axes[0].set_xlim(steps.min() - 1, max(steps.max(), steps.min() + 1) + 1)
    heights = [_draw_timeline(axes[0], _timeline(report), width - _MARGINS)]
    for axis, (label, values, colour, height, dotted) in zip(axes[1:], panels, strict=True):
        heights.append(height)
        _draw_curve(axis, curves, values, colour)
        for name, line in dotted.items():
            _plot(axis, curves, line, ~curves.undone(), color=_TEXT, ls=":", label=name)
        axis.set_ylabel(label)
    if curves.nonfinite is not None and curves.nonfinite.any():
        at = curves.step[curves.nonfinite]
        edge = axes[1].get_xaxis_transform()
        style = {"color": _BAD, "ms": 5, "transform": edge, "label": "NaN or Inf"}
        axes[1].plot(at, np.full(len(at), 0.95), "x", **style)
    legend: dict[str, Any] = {}
    for axis in axes:
        for first, last in _spans(report.incidents):
            axis.axvspan(first, last, color=_BAD, alpha=0.1, lw=0.8, label="incident")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=2)
        axis.grid(axis="x", color=_GRID, lw=0.7)
        axis.set_axisbelow(True)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    axes[-1].set_xlabel("optimizer step")
    axes[0].get_gridspec().set_height_ratios(heights)
    columns = max(int(width / 1.9), 1)
    room = 0.7 + 0.14 * len(panels) + 0.2 * np.ceil(len(legend) / columns)
    figure.set_size_inches(width, sum(heights) + room)
    place = {"loc": "outside upper left", "borderaxespad": 0.2}
    figure.legend(legend.values(), legend.keys(), frameon=False, ncols=columns, **place)


def _spans(incidents: Sequence[Incident]) -> list[tuple[float, float]]:
    """The steps of incidents, in order.

    Overlapping incidents are one span: the areas of several passes over the same steps would add up
    to a dark wall.
    """
    spans: list[tuple[float, float]] = []
    for incident in sorted(incidents[:_MAX_MARKS], key=operator.attrgetter("onset_step")):
        first, last = incident.onset_step, incident.end
        if spans and first <= spans[-1][1]:
            first, end = spans.pop()
            last = max(last, end)
        spans.append((first, last))
    return spans


# -- the timeline ---------------------------------------------------------------------------------


def _timeline(report: PageReport) -> dict[str, list[_Mark]]:
    """Kind of event -> its events, in the order of the rows from the top."""
    rollbacks: list[_Mark] = []
    skips: list[_Mark] = []
    for incident in report.incidents:
        if incident.skipped:
            text = skipped_text(incident)
            if report.is_hypothetical:
                text = f"would skip {text}"
            skips.append(_Mark(incident.onset_step, incident.end, text, _BAD))
        if report.is_hypothetical and incident.rolled_back:
            rollbacks.append(_Mark(incident.step, incident.step, "would roll back", _RATE))
    for attempt in report.attempts:
        left = attempt.left
        if left is None:
            continue
        if attempt.skipped:
            skips.append(_Mark(left, left, counted(attempt.skipped, "batch", "batches"), _BAD))
        text = f"{left:.0f} → {attempt.first_step:.0f}"
        colour = _RATE
        if attempt.killed:
            text = f"killed after {text}"
            colour = _QUIET
        elif attempt.origin != "rollback":
            text = f"{text} restart"
            colour = _QUIET
        rollbacks.append(_Mark(left, left, text, colour, attempt.first_step))
    compared: list[_Mark] = []
    for event in report.assessments:
        step = event.step or 0
        compared.append(_Mark(step, step, _verdict_text(event), _LOSS))
    ends: list[_Mark] = []
    if report.ending():
        last_steps = report.curves.step[-1:].tolist()  # empty without curves
        if report.stopped_step is not None:
            last_steps = [report.stopped_step]
        for step in last_steps:
            ends.append(_Mark(step, step, report.ending(), _TEXT))
    return {
        "alarms": _alarms(report),
        "skipped": skips,
        "weights": compared,
        "rollbacks": rollbacks,
        "end": ends,
    }


def _verdict_text(event: EventRecord) -> str:
    """Describes a verdict on the weights, whose row has the name "weights"."""
    if event.by in ("weights", "state"):
        return f"{event.by} not finite"
    better = "earlier ones better"
    if event.checkpoint is not None:
        better = f"step {event.checkpoint} better"
    texts = {
        "worse": f"{better}: waits",
        "damage": better,
        "accepted": "not repaired",
        "unknown": "no evidence",
    }
    verdict = str(event.verdict)
    return texts.get(verdict, verdict)


def _alarms(report: PageReport) -> list[_Mark]:
    """The alarms in and outside of incidents, where close alarms of one cause are one mark."""
    marks: list[_Mark] = []
    for step, cause in report.alarms_outside.items():
        marks.append(_Mark(step, step, flags_text(cause), _QUIET))
    for incident in report.incidents:
        if incident.cause:
            text = flags_text(incident.cause)
            marks.append(_Mark(incident.onset_step, incident.end, text, _BAD))
    near = 0.0
    if len(report.curves.step):
        near = np.ptp(report.curves.step) / 100
    alarms: list[_Mark] = []
    for mark in sorted(marks, key=operator.attrgetter("first")):
        if alarms and alarms[-1].text == mark.text and mark.first - alarms[-1].last <= near:
            alarms[-1] = alarms[-1]._replace(last=max(alarms[-1].last, mark.last))
        else:
            alarms.append(mark)
    return alarms


def _draw_timeline(axis: Any, kinds: dict[str, list[_Mark]], inches: float) -> float:
    """Draws each event with its text in a free row, and an arc from a rollback to its checkpoint.

    A row is free if the text does not overlap the last event of the row.

    Args:
        axis: the axis of the timeline, with the limits of its steps.
        kinds: kind of event -> its events.
        inches: width of the axis.

    Returns:
        The height in inches.
    """
    low, high = axis.get_xlim()
    per_inch = (high - low) / inches
    names: dict[str, float] = {}  # name of a kind -> centre of its rows in inches
    y = 0.0
    for name, marks in kinds.items():
        ends: list[float] = []  # for each row, the end of its last event
        row_height = 0.2
        if any(mark.to is not None for mark in marks):
            row_height = 0.34  # room for the arcs
        for mark in sorted(marks[:_MAX_MARKS], key=operator.attrgetter("first")):
            first, text = mark.first, mark.text
            if mark.to is not None:
                first = min(first, mark.to)
            right, left, inside = high - mark.last, first - low, mark.last - first
            fitting = int(max(right, left, inside) / per_inch / _CHARACTER_WIDTH) - 4
            if len(text) > fitting + 1:
                text = f"{text[: max(fitting, 0)]}…"
            size = (len(text) * _CHARACTER_WIDTH + 0.15) * per_inch
            at, offset, side = mark.last, 5, "left"
            begin, end = first, mark.last + size
            if right < size:
                side = "right"
                end = mark.last
                if left < inside:  # under the arc
                    offset = -8
                else:  # to the left of the bar
                    at, offset = first, -5
                    begin = first - size
            row = _free_row(ends, begin)
            if row >= _MAX_ROWS:  # the last row has bars without texts, which may overlap
                row = _MAX_ROWS
                text = ""
            if row == len(ends):
                ends.append(end)
            ends[row] = max(ends[row], end)
            height = y + (row + 1) * row_height - 0.1
            _draw_bar(axis, mark, height)
            place = {"va": "center_baseline", "textcoords": "offset points", "ha": side}
            axis.annotate(text, (at, height), (offset, 0), **place).set_in_layout(False)
        if marks:
            names[name] = y + row_height * len(ends) / 2
        y += row_height * len(ends)
    y = max(y, 0.2) + 0.05
    axis.set_ylim(y, 0)
    axis.set_yticks([*names.values()], [*names])
    return y


def _free_row(ends: Sequence[float], begin: float) -> int:
    """The first row whose last event ends before `begin`, or the number of rows."""
    for row, end in enumerate(ends):
        if end <= begin:
            return row
    return len(ends)


def _draw_bar(axis: Any, mark: _Mark, y: float) -> None:
    """Draws the bar of an event, and the arc to the step from which the run continued."""
    style = {"color": mark.colour, "clip_on": False}
    axis.plot((mark.first, mark.last), [y] * 2, lw=5, solid_capstyle="projecting", **style)
    if mark.to is not None:
        arc = np.linspace(0, np.pi, 33)
        middle = (mark.first + mark.to) / 2
        half = (mark.first - mark.to) / 2
        axis.plot(middle + half * np.cos(arc), y - 0.2 * np.sin(arc), **style)
        axis.plot(mark.to, y, marker=7, ms=6, **style)  # a head that points down


# -- the curves -----------------------------------------------------------------------------------


def _panels(report: PageReport) -> list[tuple[str, np.ndarray, str, float, dict[str, np.ndarray]]]:
    """Label, values, colour, height in inches, and dotted lines of each panel."""
    curves = report.curves
    panels: list[Any] = [("loss", curves.loss, _LOSS, 2.2, {})]
    if curves.grad_norm is not None:
        dotted = {}
        if curves.threshold is not None:
            dotted["clip threshold"] = curves.threshold
        panels.append(("gradient\nnorm (L2)", curves.grad_norm, _NORM, 1.1, dotted))
    rate, scale = curves.lr, curves.lr_scale
    if rate is not None and scale is not None:
        scaled = rate * np.where(np.isnan(scale), 1.0, scale)
        # The line is the rate of the run, and the dotted line the rate that it did not have.
        shown, other, label = scaled, rate, "rate without healcore"
        if report.is_hypothetical:
            shown, other, label = rate, scaled, "rate with healcore"
        dotted = {label: np.where(scaled == rate, np.nan, other)}
        panels.append(("learning\nrate", shown, _RATE, 1.1, dotted))
    elif scale is not None and (scale < 1).any():
        panels.append(("learning\nrate ×", scale, _RATE, 0.8, {}))
    return panels


def _draw_curve(axis: Any, curves: Curves, values: np.ndarray, colour: str) -> None:
    """Draws a curve; undone steps have another colour. A wide range makes the axis logarithmic."""
    undone = curves.undone()
    _plot(axis, curves, values, undone, color=_UNDONE, label="undone steps")
    _plot(axis, curves, values, ~undone, color=colour)
    axis.grid(axis="y", color=_GRID, lw=0.7)
    shown = values[np.isfinite(values)]
    if len(shown) and 0 < shown.min() < shown.max() / _LOG_AXIS_RATIO:
        axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")


def _plot(axis: Any, curves: Curves, values: np.ndarray, where: np.ndarray, **style: Any) -> None:
    """Draws a line through the rows in `where`.

    A logged NaN or Inf makes a gap, and so does a rollback.
    """
    finite = np.isfinite(values)
    logged = where & finite
    if curves.nonfinite is not None:
        logged = where & (finite | curves.nonfinite)
    if (where & finite).any():
        x, y = curves.step[logged], np.where(finite, values, np.nan)[logged]
        breaks = np.diff(x) <= 0
        at = np.flatnonzero(breaks) + 1
        axis.plot(np.insert(x, at, np.nan), np.insert(y, at, np.nan), **{"lw": 1.2, **style})
