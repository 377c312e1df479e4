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
from healcore.history.run_history import RunAttempt
from healcore.tools.report.incident_text import skipped_text
from healcore.tools.report.page_report import PageReport

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
_LEFT_MARGIN = 1.0
"""Inches left of the axes."""
_CHARACTER_WIDTH = 0.07
"""Width of a character in inches."""
_LOG_AXIS_RATIO = 30.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_UNDONE_ROOM = 1e4
"""Ratio to the largest kept value from which an undone curve leaves a logarithmic axis."""
_MAX_MARKS = 300
"""Limit of events of one kind."""
_MAX_ROWS = 5
"""Limit of rows with text for events of one kind."""
_VERDICTS = {
    ("damage", "weights"): "not finite",
    ("damage", "state"): "state not finite",
    ("unknown", "nothing"): "no evidence",
    ("unknown", "budget"): "budget exhausted",
}
"""(`verdict`, `by`) of an event `assessment` -> text on the timeline."""


class _Mark(NamedTuple):
    """An event on the timeline."""

    first: float
    last: float
    text: str
    colour: str
    to: float | None = None
    """Step from which the run continued."""
    short: str = ""
    """A shorter text for little room, or an empty string."""


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
    steps = curves.step
    if not len(steps):
        steps = np.zeros(1)
    per_inch = max(np.ptp(steps), 1.0) / (width - _LEFT_MARGIN - 0.3)
    limits = steps.min() - 0.1 * per_inch, max(steps.max(), steps.min() + 1) + 0.1 * per_inch
    axes = [figure.add_axes((0, 0, 1, i + 1), xlim=limits) for i in range(1 + len(panels))]
    heights = [_draw_timeline(axes[0], _timeline(report), limits, per_inch)]
    heights += [height for *_, height, _ in panels]
    for axis, (label, values, colour, _, other) in zip(axes[1:], panels, strict=True):
        _draw_curve(axis, curves, values, colour)
        for name, line in other.items():
            _plot(axis, curves, line, ~curves.undone(), color=_TEXT, ls=":", label=name)
        axis.set_ylabel(label)
    if curves.nonfinite is not None and curves.nonfinite.any():
        at = curves.step[curves.nonfinite]
        edge = axes[1].get_xaxis_transform()
        style = {"color": _BAD, "ms": 5, "transform": edge, "label": "NaN or Inf"}
        axes[1].plot(at, np.full(len(at), 0.95), "x", **style)
    legend: dict[str, Any] = {}
    for axis in axes:
        _shade_incidents(axis, report.incidents)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    left, columns = _LEFT_MARGIN - 0.1, 6
    if width < 9:  # a page of the documentation
        columns = 4
    if width < 6:  # a phone
        left, columns = 0, 2
    y = 0.12 + 0.2 * np.ceil(len(legend) / columns)
    total = y + sum(heights) + 0.14 * len(panels) + 0.45
    figure.set_size_inches(width, total)
    for axis, height in zip(axes, heights, strict=True):
        y += height + 0.14
        box = (
            _LEFT_MARGIN / width,
            1 - (y - 0.14) / total,
            1 - (_LEFT_MARGIN + 0.1) / width,
            height / total,
        )
        axis.set_position(box)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=2, labelbottom=axis is axes[-1])
        axis.grid(axis="x", color=_GRID, lw=0.7)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel("optimizer step")
    place = {"loc": "upper left", "bbox_to_anchor": (left / width, 1), "borderaxespad": 0.2}
    figure.legend(legend.values(), legend.keys(), frameon=False, ncols=columns, **place)


def _shade_incidents(axis: Any, incidents: Sequence[Incident]) -> None:
    """Shades the steps of incidents, and the further steps of rollbacks without an incident.

    Each step is shaded once: the areas of several passes over the same steps would add up to a dark
    wall.
    """
    of_incidents: list[tuple[float, float]] = []
    of_rollbacks: list[tuple[float, float]] = []
    for incident in incidents[:_MAX_MARKS]:
        spans = of_rollbacks
        if incident.number:
            spans = of_incidents
        spans.append((incident.onset_step, incident.end))
    of_incidents = _joined(of_incidents)
    for first, last in of_incidents:
        axis.axvspan(first, last, color=_BAD, alpha=0.1, lw=0.8, label="incident")
    for span in _joined(of_rollbacks):
        for first, last in _outside(span, of_incidents):
            axis.axvspan(first, last, color=_RATE, alpha=0.1, lw=0.8, label="rolled back")


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans in their order, with overlapping spans as one."""
    joined: list[tuple[float, float]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def _outside(
    span: tuple[float, float], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The parts of a span that are outside of other spans, which are in order and disjoint."""
    parts: list[tuple[float, float]] = []
    first, end = span
    for other_first, other_last in others:
        if other_last < first or other_first > end:
            continue
        if first < other_first:
            parts.append((first, other_first))
        first = max(first, other_last)
        if first >= end:
            return parts
    return [*parts, (first, end)]


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
    rollback_count = sum(each.origin == "rollback" for each in report.attempts)
    number = 0
    for attempt in report.attempts:
        left = attempt.left
        if left is None:
            continue
        if attempt.skipped:
            skips.append(_Mark(left, left, counted(attempt.skipped, "batch", "batches"), _BAD))
        text = short = f"{left:.0f} → {attempt.first_step:.0f}"
        colour = _RATE
        if attempt.origin == "rollback":
            number += 1
            if rollback_count > 1:  # the arcs are in the order of their steps
                text = f"{number}: {text}"
        else:
            text = short = _restart_text(attempt, left)
            colour = _QUIET
        rollbacks.append(_Mark(left, left, text, colour, attempt.first_step, short))
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


def _restart_text(attempt: RunAttempt, left: float) -> str:
    """Describes a restart after `left` steps, for example "330 → 300 restart"."""
    first = f"{attempt.first_step:.0f}"
    if attempt.killed:
        return f"killed after {left:.0f} → {first}"
    if left == attempt.first_step:
        return f"restart at {first}"
    return f"{left:.0f} → {first} restart"


def _verdict_text(event: EventRecord) -> str:
    """Describes a verdict on the weights, whose row has the name "weights"."""
    found = event.verdict, event.by
    if found in _VERDICTS:
        return _VERDICTS[found]
    if event.verdict not in ("worse", "damage", "accepted"):
        return str(event.verdict)
    text = "earlier ones better"
    if event.checkpoint is not None:
        text = f"step {event.checkpoint} better"
    if event.verdict == "worse":
        text += ": waits"
    elif event.verdict == "accepted":
        text += ": not repaired"
    return text


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


class _Label(NamedTuple):
    """The text of an event on the timeline, and the room that the event needs with its text."""

    text: str
    side: str
    """Horizontal alignment of the text: "left" or "right"."""
    x: float
    """Step at which the text is anchored."""
    offset: float
    """Distance of the text from `x` in points."""
    begin: float
    end: float


def _draw_timeline(
    axis: Any, kinds: dict[str, list[_Mark]], limits: tuple[float, float], per_inch: float
) -> float:
    """Draws each event with its text in a free row, and an arc from a rollback to its checkpoint.

    A row is free if the text does not overlap the last event of the row.

    Returns the height in inches.
    """
    names: dict[str, float] = {}  # name of a kind -> centre of its rows in inches
    y = 0.0
    for name, marks in kinds.items():
        ends: list[float] = []  # for each row, the end of its last event
        row_height = 0.2
        if any(mark.to is not None for mark in marks):
            row_height = 0.34  # room for the arcs
        for mark in sorted(marks[:_MAX_MARKS], key=operator.attrgetter("first")):
            label = _label_of(mark, limits, per_inch)
            row = _free_row(ends, label.begin)
            if row >= _MAX_ROWS:  # the last row has bars without texts, which may overlap
                row = _MAX_ROWS
                label = label._replace(text="")
            if row < len(ends):
                ends[row] = max(ends[row], label.end)
            else:
                ends.append(label.end)
            _draw_mark(axis, mark, label, y + (row + 1) * row_height - 0.1)
        if marks:
            names[name] = y + row_height * len(ends) / 2
        y += row_height * len(ends)
    axis.set_ylim(y + 0.05, 0)
    axis.set_yticks([*names.values()], [*names])
    return y + 0.05


def _label_of(mark: _Mark, limits: tuple[float, float], per_inch: float) -> _Label:
    """Places the text of an event to the right of its bar, or to the left near the right edge.

    If neither side has the room, the text is under the arc of a rollback, or is shortened.
    """
    first, last = mark.first, mark.last
    if mark.to is not None:
        first = min(first, mark.to)
    size = (len(mark.text) * _CHARACTER_WIDTH + 0.15) * per_inch
    room_left = first - limits[0]
    room_right = limits[1] - last
    if max(room_left, room_right) < size < last - first:
        return _Label(mark.text, "right", x=last, offset=-8, begin=first, end=last)
    is_left = room_right < min(size, room_left)
    room = room_right
    if is_left:
        room = room_left
    text = mark.text
    max_characters = int(room / per_inch / _CHARACTER_WIDTH) - 3
    if len(text) > max_characters + 1 and mark.short:
        text = mark.short
    if len(text) > max_characters + 1:
        text = f"{text[: max(max_characters, 0)]}…"
    if is_left:
        return _Label(text, "right", x=first, offset=-5, begin=first - size, end=last)
    return _Label(text, "left", x=last, offset=5, begin=first, end=last + size)


def _free_row(ends: Sequence[float], begin: float) -> int:
    """The first row whose last event ends before `begin`, or the number of rows."""
    for row, end in enumerate(ends):
        if end <= begin:
            return row
    return len(ends)


def _draw_mark(axis: Any, mark: _Mark, label: _Label, y: float) -> None:
    """Draws the bar of an event, the arc to the step from which the run continued, and the text."""
    style = {"color": mark.colour, "clip_on": False}
    axis.plot((mark.first, mark.last), [y] * 2, lw=5, solid_capstyle="projecting", **style)
    if mark.to is not None:
        arc = np.linspace(0, np.pi, 33)
        middle = (mark.first + mark.to) / 2
        half = (mark.first - mark.to) / 2
        axis.plot(middle + half * np.cos(arc), y - 0.2 * np.sin(arc), **style)
        axis.plot(mark.to, y, marker=7, ms=6, **style)  # a head that points down
    place = {"va": "center_baseline", "textcoords": "offset points", "ha": label.side}
    axis.annotate(label.text, (label.x, y), (label.offset, 0), **place)


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
        if report.is_hypothetical:
            shown, other, label = rate, scaled, "rate with healcore"
        else:
            shown, other, label = scaled, rate, "rate without healcore"
        dotted = {label: np.where(scaled == rate, np.nan, other)}
        panels.append(("learning\nrate", shown, _RATE, 1.1, dotted))
    elif scale is not None and (scale < 1).any():
        panels.append(("learning\nrate ×", scale, _RATE, 0.8, {}))
    return panels


def _draw_curve(axis: Any, curves: Curves, values: np.ndarray, colour: str) -> None:
    """Draws a curve; undone steps have another colour. A wide range makes the axis logarithmic."""
    undone = curves.undone()
    finite = np.isfinite(values)
    _plot(axis, curves, values, undone, color=_UNDONE, label="undone steps")
    _plot(axis, curves, values, ~undone, color=colour)
    axis.grid(axis="y", color=_GRID, lw=0.7)
    shown = values[finite]
    kept = values[finite & ~undone]
    low = high = 0.0
    if len(kept):
        low, high = kept.min(), kept.max()
    is_log = len(shown) and 0 < shown.min() < shown.max() / _LOG_AXIS_RATIO
    if is_log:
        room = _UNDONE_ROOM
        axis.set_yscale("log")
    else:
        room = _LOG_AXIS_RATIO
        axis.set_yscale("linear")
    axis.yaxis.set_major_formatter("{x:g}")
    if 0 < high < shown.max() / room:
        # The undone steps leave the panel, so that the kept steps are not flat.
        if is_log:
            axis.set_ylim(low / 1.3, high * _UNDONE_ROOM)
        else:
            axis.set_ylim(min(low, 0.0) * 1.3, high * 1.3)
        at = curves.step[finite][shown.argmax()]
        side = "left"
        if at > np.mean(axis.get_xlim()):
            side = "right"
        style = {"color": _UNDONE, "va": "top", "transform": axis.get_xaxis_transform()}
        axis.text(at, 0.86, f" ↑ up to {shown.max():.3g} ", ha=side, **style)


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
