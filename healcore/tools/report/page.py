"""Renders reports as one self-contained HTML page without scripts; each run is one SVG figure.

A figure is a timeline of what happened, above the curves of the run.
"""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

import healcore
from healcore.adapter_registry import require
from healcore.console import counted
from healcore.events.schema import flag_names, sentence
from healcore.history import Curves, Incident, Mode
from healcore.tools.report.run_report import RunReport, short_names

_MAX_DRAWN = 12
"""Limit of runs with a figure."""


def render(reports: Sequence[RunReport]) -> str:
    """Renders reports as a self-contained HTML page.

    The page's Content-Security-Policy forbids scripts and network access. So text from a log could
    not run as a script even without escaping.

    Args:
        reports: the runs, which the page sorts by severity.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("a report needs at least one run")
    require("report", "jinja2", "matplotlib")
    from jinja2 import Environment, StrictUndefined

    severity = operator.attrgetter("counts.rollbacks", "counts.incidents", "counts.skips")
    reports = sorted(reports, key=severity, reverse=True)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    # Functions for the template, which escapes every text.
    environment.globals |= {"batches": _batches, "flag_names": flag_names, "outcome": outcome}
    environment.globals |= {"step_range": _step_range, "losses": _losses, "counted": counted}
    template = resources.files("healcore.tools.report").joinpath("page.html")
    drawn = [report if len(report.curves.step) else None for report in reports[:_MAX_DRAWN]]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        reports=reports,
        names=short_names(reports),
        version=healcore.__version__,
        figures=[{kind: draw(r, width) for kind, width in WIDTHS.items() if r} for r in drawn],
    )


def _losses(curves: Curves) -> np.ndarray:
    """The finite losses that were not undone."""
    return curves.loss[np.isfinite(curves.loss) & ~curves.undone()]


# -- the table of incidents ------------------------------------------------------------------------


def _batches(incident: Incident) -> str:
    batches = sorted(incident.skipped_batches or incident.batches)
    if not batches:
        return ""
    (epoch, first), (last_epoch, last) = batches[0], batches[-1]
    text = f"epoch {epoch}: {_step_range(first, last)}"
    if epoch != last_epoch:
        text = f"epoch {epoch}: {first} to epoch {last_epoch}: {last}"
    return f"{text} ({len(batches)} skipped)" if incident.skipped_batches else text


def _step_range(first: float, last: float) -> str:
    """A range of steps as text: "7" or "7–12"."""
    return f"{first:.0f}" if first == last else f"{first:.0f}–{last:.0f}"


def outcome(incident: Incident) -> str:
    """The outcome of an incident as text."""
    if incident.mode is Mode.REPLAY:
        return _would_text(incident)
    responses = [sentence(event) for event in incident.responses]
    skipped = f"skipped {_skipped(incident)}" if incident.skipped else ""
    if responses and incident.declined and skipped:
        responses.insert(0, skipped)
    if incident.mode is Mode.OBSERVE:
        return "; ".join(["only observed, nothing changed", _would_text(incident), *responses])
    if responses:
        return "; ".join(responses)
    return f"{skipped}, then training continued" if skipped else "training continued"


def _skipped(incident: Incident) -> str:
    return f"{counted(incident.skipped, 'step')}{' or more' if incident.capped else ''}"


def _would_text(incident: Incident) -> str:
    """What the policy would have done, if its orders had been carried out."""
    parts = [f"skipped {_skipped(incident)}"] if incident.skipped else []
    parts += [f"clipped {counted(incident.clipped, 'step')}"] if incident.clipped else []
    orders = {"ROLLBACK": "rolled back", "STOP": "stopped the run"}
    parts += [done for order, done in orders.items() if order in incident.action]
    return f"would have {', '.join(parts)}" if parts else "alert only"


# -- the figure of a run ---------------------------------------------------------------------------

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
_LEFT, _CHARACTER = 1.0, 0.07  # inches left of the axes, and of a character
_WIDE = 30.0  # ratio of values from which an axis is logarithmic
_ROOM = 1e4  # ratio to the largest kept value from which an undone curve leaves such an axis
_MAX_MARKS = 300
"""Limit of events of one kind."""
_MAX_ROWS = 5
"""Limit of rows with text for events of one kind."""
_VERDICTS = {"damage": "weights damaged", "worse": "weights worse", "unknown": "no evidence"}


class _Mark(NamedTuple):
    """An event on the timeline."""

    first: float
    last: float
    text: str
    colour: str
    to: float | None = None  # step from which the run continued


def draw(report: RunReport, width: float) -> str:
    """Draws a run as an SVG element, or raises ImportError without matplotlib.

    The style sheet in the element follows the reader's light or dark setting.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**STYLE, "svg.hashsalt": f"{report.title} {width}"}):
        figure = Figure()
        plot(figure, report, width)
        return to_svg(figure)


def to_svg(figure: Any) -> str:
    """An SVG element of a figure, whose style sheet has the colours for a dark page too."""
    file = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=metadata)
    svg = file.getvalue().partition("<svg")[2]
    svg = re.sub(r"; font-family: [^;\"]*", "; font-family: system-ui, sans-serif", svg)
    svg = re.sub(": #([0-9a-f]{6})", r": var(--c\1, #\1)", svg)
    dark = ";".join(f"--c{colour[1:]}:{value}" for colour, value in _DARK.items())
    rules = f"<style>@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return "<svg" + svg.replace('<style type="text/css">', rules, 1)


def plot(figure: Any, report: RunReport, width: float) -> None:
    """As `draw`, into a figure of matplotlib: places timeline and curves top down in inches."""
    curves, panels = report.curves, _panels(report)
    steps = curves.step if len(curves.step) else np.zeros(1)
    per_inch = max(np.ptp(steps), 1.0) / (width - _LEFT - 0.3)
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
        for each in report.incidents[:_MAX_MARKS]:
            axis.axvspan(each.onset_step, each.end, color=_BAD, alpha=0.1, lw=0.8, label="incident")
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            legend.setdefault(label, handle)
    left, columns = (0, 2) if width < 6 else (_LEFT - 0.1, 6)
    y = 0.12 + 0.2 * np.ceil(len(legend) / columns)
    total = y + sum(heights) + 0.14 * len(panels) + 0.45
    figure.set_size_inches(width, total)
    for axis, height in zip(axes, heights, strict=True):
        y += height + 0.14
        box = (_LEFT / width, 1 - (y - 0.14) / total, 1 - (_LEFT + 0.1) / width, height / total)
        axis.set_position(box)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=2, labelbottom=axis is axes[-1])
        axis.grid(axis="x", color=_GRID, lw=0.7)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel("optimizer step")
    place = {"loc": "upper left", "bbox_to_anchor": (left / width, 1), "borderaxespad": 0.2}
    figure.legend(legend.values(), legend.keys(), frameon=False, ncols=columns, **place)


# -- the timeline ---------------------------------------------------------------------------------


def _timeline(report: RunReport) -> dict[str, list[_Mark]]:
    """Kind of event -> its events."""
    near = np.ptp(report.curves.step) / 100 if len(report.curves.step) else 0.0
    outside = report.alarms_outside.items()
    incidents = report.incidents
    marks = [_Mark(step, step, flag_names(cause), _QUIET) for step, cause in outside]
    marks += [_Mark(e.onset_step, e.end, flag_names(e.cause), _BAD) for e in incidents if e.cause]
    alarms, skips, rollbacks = list[_Mark](), list[_Mark](), list[_Mark]()
    for mark in sorted(marks, key=lambda mark: mark.first):
        if alarms and alarms[-1].text == mark.text and mark.first - alarms[-1].last <= near:
            alarms[-1] = alarms[-1]._replace(last=max(alarms[-1].last, mark.last))
        else:
            alarms.append(mark)
    for incident in incidents:
        if incident.skipped:
            text = ("would skip " if report.is_hypothetical else "") + _skipped(incident)
            skips.append(_Mark(incident.onset_step, incident.end, text, _BAD))
        if report.is_hypothetical and incident.rolled_back:
            rollbacks.append(_Mark(incident.step, incident.step, "would roll back", _RATE))
    for each in report.attempts:
        if each.left is not None:
            kind, colour = ("", _RATE) if each.origin == "rollback" else (" restart", _QUIET)
            if each.skipped:
                text = counted(each.skipped, "batch", "batches")
                skips.append(_Mark(each.left, each.left, text, _BAD))
            text = f"{each.left:.0f} → {each.first_step:.0f}{kind}"
            rollbacks.append(_Mark(each.left, each.left, text, colour, each.first_step))
    compared = [
        _Mark(e.step or 0, e.step or 0, _VERDICTS.get(str(e.verdict), str(e.verdict)), _LOSS)
        for e in report.assessments
    ]
    end = report.curves.step[-1:].tolist() if report.stopped_step is None else [report.stopped_step]
    ends = [_Mark(step, step, report.ending(), _TEXT) for step in end if report.ending()]
    lanes = {"alarms": alarms, "skipped": skips, "compared": compared, "rollbacks": rollbacks}
    return {**lanes, "end": ends}


def _draw_timeline(
    axis: Any, kinds: dict[str, list[_Mark]], limits: tuple[float, float], per_inch: float
) -> float:
    """Draws each event with its text in a free row, and an arc from a rollback to its checkpoint.

    Returns the height in inches.
    """
    names = dict[str, float]()
    arc = np.linspace(0, np.pi, 33)
    y = 0.0
    for name, marks in kinds.items():
        ends: list[float] = []  # of each row
        row_height = 0.34 if any(mark.to is not None for mark in marks) else 0.2
        for mark in sorted(marks[:_MAX_MARKS], key=lambda mark: mark.first):
            first, last = mark.first if mark.to is None else min(mark.first, mark.to), mark.last
            size = (len(mark.text) * _CHARACTER + 0.15) * per_inch
            room = limits[1] - last
            is_left = room < min(size, first - limits[0])
            most = int((first - limits[0] if is_left else room) / per_inch / _CHARACTER) - 3
            text = mark.text if len(mark.text) <= most + 1 else f"{mark.text[: max(most, 0)]}…"
            begin, end = (first - size, last) if is_left else (first, last + size)
            row = next((i for i, end in enumerate(ends) if end <= begin), len(ends))
            if row >= _MAX_ROWS:
                row, text = _MAX_ROWS, ""
            ends[row : row + 1] = [max([end, *ends[row : row + 1]])]
            at, style = y + (row + 1) * row_height - 0.1, {"color": mark.colour, "clip_on": False}
            axis.plot(mark[:2], [at, at], lw=5, solid_capstyle="projecting", **style)
            if mark.to is not None:
                middle, half = (mark.first + mark.to) / 2, (mark.first - mark.to) / 2
                axis.plot(middle + half * np.cos(arc), at - 0.2 * np.sin(arc), **style)
                axis.plot(mark.to, at, marker=7, ms=6, **style)  # a head that points down
            side, at_x, offset = ("right", first, -5) if is_left else ("left", last, 5)
            place = {"va": "center_baseline", "textcoords": "offset points", "ha": side}
            axis.annotate(text, (at_x, at), (offset, 0), **place)
        if marks:
            names[name] = y + row_height * len(ends) / 2
        y += row_height * len(ends)
    axis.set_ylim(y + 0.05, 0)
    axis.set_yticks([*names.values()], [*names])
    return y + 0.05


# -- the curves -----------------------------------------------------------------------------------


def _panels(report: RunReport) -> list[tuple[str, np.ndarray, str, float, dict[str, np.ndarray]]]:
    """Label, values, colour, height in inches, and dotted lines of each panel."""
    curves = report.curves
    panels: list[Any] = [("loss", curves.loss, _LOSS, 2.2, {})]
    if curves.grad_norm is not None:
        dotted = {} if curves.threshold is None else {"clip threshold": curves.threshold}
        panels.append(("gradient\nnorm (L2)", curves.grad_norm, _NORM, 1.1, dotted))
    rate, scale = curves.lr, curves.lr_scale
    if rate is not None and scale is not None:
        scaled = rate * np.where(np.isnan(scale), 1.0, scale)
        shown, name, other = (
            (rate, "with", scaled) if report.is_hypothetical else (scaled, "without", rate)
        )
        dotted = {f"rate {name} healcore": np.where(scaled == rate, np.nan, other)}
        panels.append(("learning\nrate", shown, _RATE, 1.1, dotted))
    elif scale is not None and (scale < 1).any():
        panels.append(("learning\nrate ×", scale, _RATE, 0.8, {}))
    return panels


def _draw_curve(axis: Any, curves: Curves, values: np.ndarray, colour: str) -> None:
    """Draws a curve; undone steps have another colour. A wide range makes the axis logarithmic."""
    undone, finite = curves.undone(), np.isfinite(values)
    _plot(axis, curves, values, undone, color=_UNDONE, label="undone steps")
    _plot(axis, curves, values, ~undone, color=colour)
    axis.grid(axis="y", color=_GRID, lw=0.7)
    shown, kept = values[finite], values[finite & ~undone]
    is_log = len(shown) and 0 < shown.min() < shown.max() / _WIDE
    axis.set_yscale("log" if is_log else "linear")
    axis.yaxis.set_major_formatter("{x:g}")
    low, high = (kept.min(), kept.max()) if len(kept) else (0.0, 0.0)
    if 0 < high < shown.max() / (_ROOM if is_log else _WIDE):
        axis.set_ylim(*((low / 1.3, high * _ROOM) if is_log else (min(low, 0.0) * 1.3, high * 1.3)))
        at = curves.step[finite][shown.argmax()]
        style = {"color": _UNDONE, "va": "top", "transform": axis.get_xaxis_transform()}
        side = "right" if at > np.mean(axis.get_xlim()) else "left"
        axis.text(at, 0.86, f" ↑ up to {shown.max():.3g} ", ha=side, **style)


def _plot(axis: Any, curves: Curves, values: np.ndarray, where: np.ndarray, **style: Any) -> None:
    """Draws a line through the rows in `where`. A logged NaN or Inf and a rollback make a gap."""
    finite = np.isfinite(values)
    logged = where & (finite if curves.nonfinite is None else finite | curves.nonfinite)
    if (where & finite).any():
        x, y = curves.step[logged], np.where(finite, values, np.nan)[logged]
        back = np.flatnonzero(np.diff(x) <= 0) + 1
        axis.plot(np.insert(x, back, np.nan), np.insert(y, back, np.nan), **{"lw": 1.2, **style})
