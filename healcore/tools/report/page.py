"""Renders reports as one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np

import healcore
from healcore.console import counted
from healcore.events.schema import flag_names, sentence
from healcore.extras import require
from healcore.history import Curves, Incident, Mode
from healcore.tools.report.picture import WIDTHS, draw
from healcore.tools.report.run_report import RunReport, by_severity, short_names

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

    reports = by_severity(reports)
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
        return _replay_text(incident)
    responses = [sentence(event) for event in incident.responses]
    if responses and incident.declined and incident.skipped:
        responses.insert(0, f"skipped {_skipped(incident)}")
    if incident.mode is Mode.OBSERVE:
        return "; ".join([f"only observed, nothing changed{_would_text(incident)}", *responses])
    if responses:
        return "; ".join(responses)
    return (
        f"skipped {_skipped(incident)}, then training continued"
        if incident.skipped
        else "training continued"
    )


def _skipped(incident: Incident) -> str:
    return f"{counted(incident.skipped, 'step')}{' or more' if incident.capped else ''}"


def _would_text(incident: Incident) -> str:
    parts = [f"skipped {_skipped(incident)}"] if incident.skipped else []
    orders = {"ROLLBACK": "rolled back", "STOP": "stopped the run"}
    parts += [done for order, done in orders.items() if order in incident.action]
    return f"; it would have {', '.join(parts)}" if parts else ""


def _replay_text(incident: Incident) -> str:
    parts: list[str] = []
    if incident.denied:
        parts.append("a rollback was due and the budget was exhausted: the run would stop")
    elif "ROLLBACK" in incident.action:
        parts.append(f"would roll back{_more_rollbacks(incident)}")
    if "STOP" in incident.action and not incident.denied:
        parts.append("would stop")
    if incident.skipped:
        parts.append(f"{counted(incident.skipped, 'step')} skipped")
    if incident.clipped:
        parts.append(f"{incident.clipped} clipped")
    return ", ".join(parts) or "alert only"


def _more_rollbacks(incident: Incident) -> str:
    more = "once more" if incident.repeats == 1 else f"{incident.repeats} times more"
    if not incident.repeat_denied:
        return f" ({more} if that had not helped)" if incident.repeats else ""
    first = f"{more}, and then " if incident.repeats else ""
    return f" (if that had not helped: {first}it would stop)"
