"""Renders reports as one self-contained HTML page without scripts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

import healcore
from healcore.console import counted
from healcore.events.schema import flag_names, sentence
from healcore.extras import require
from healcore.history import Incident, IncidentOutcome, Mode, RunState
from healcore.tools.report.picture import draw
from healcore.tools.report.run_report import RunReport, by_severity, short_names

_MAX_INCIDENTS = 1000
"""Limit of rows in a table of incidents, because browsers cannot open pages with many more."""
_MAX_DRAWN = 12
"""Limit of runs with curves."""
_MAX_ATTEMPTS = 50
_MAX_TENSORS = 5
_MAX_CUTS = 6
_NOTHING = "–"

_CAPTIONS = {
    Mode.HEAL: "Pale steps were undone by a rollback or a restart; the numbers above include "
    "them. A dotted line leads from a rollback to its checkpoint.",
    Mode.OBSERVE: "The policy only observed and did not change this run. Marks show what the "
    "policy would have ordered. Pale steps were undone by a restart.",
    Mode.REPLAY: "A replay, which did not change this run. Marks show what the policy would have "
    "ordered. The run itself repeated the pale steps.",
}
_BADGES = {RunState.COMPLETED: "good", RunState.RUNNING: "open", RunState.UNKNOWN: "open"}
"""CSS class of a state's badge; the class of other states is `bad`."""
_OVERVIEW = ("Run", "Policy", "Rows", "Incidents", "Rollbacks", "Skips", "Clips", "Ending")
_COLUMNS = ("Incident", "Steps", "Cause", "Outcome", "Skipped", "LR ×", "Batches", "Evidence")


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
    names = short_names(reports)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    template = resources.files("healcore.tools.report").joinpath("page.html")
    # The template escapes every text.
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        title=names[0] if len(names) == 1 else f"{len(names)} runs",
        heads=_OVERVIEW,
        overview=[_overview(*each) for each in zip(reports, names, strict=True)],
        sections=[_section(report, drawn=i < _MAX_DRAWN) for i, report in enumerate(reports)],
        columns=_COLUMNS,
        version=healcore.__version__,
    )


def _overview(report: RunReport, name: str) -> tuple[str, ...]:
    counts = report.counts
    return (
        name,
        report.policy_name,
        report.row_count,
        str(counts.incidents),
        str(counts.rollbacks),
        f"{counts.skips:,}",
        _NOTHING if counts.clips is None else f"{counts.clips:,}",
        report.ending() or _NOTHING,
    )


def _section(report: RunReport, *, drawn: bool) -> dict[str, Any]:
    has_curves = drawn and len(report.curves.step)
    mood = "open" if report.state is None else _BADGES.get(report.state, "bad")
    badges = [(mood, report.ending())] if report.ending() else []
    if report.would:
        badges.append(("open", "nothing was changed"))
    facts = dict(report.facts)
    if len(report.attempts) > 1:
        texts = [report.attempt_text(attempt) for attempt in report.attempts[:_MAX_ATTEMPTS]]
        facts["Attempts"] = "; ".join(texts)
    return {
        "report": report,
        "badges": badges,
        "tiles": _tiles(report),
        "figure": base64.b64encode(draw(report)).decode() if has_curves else "",
        "caption": _CAPTIONS[report.mode],
        "rows": [_cells(report, incident) for incident in report.incidents[:_MAX_INCIDENTS]],
        "more": max(len(report.incidents) - _MAX_INCIDENTS, 0),
        "facts": facts,
    }


def _tiles(report: RunReport) -> list[tuple[str, str]]:
    """Numbers of a run and their names."""
    counts, would = report.counts, "would be " if report.would else ""
    tiles = [
        (counts.incidents, f"incidents{_undone(counts.undone_incidents)}"),
        (counts.rollbacks, "would roll back" if report.would else "rollbacks"),
        (counts.skips, f"steps {would}skipped{_undone(counts.undone_skips)}"),
        (counts.clips, f"steps {would}clipped"),
        (counts.alarms, "steps with an alarm"),
    ]
    shown = [(f"{count:,}", name) for count, name in tiles if count is not None]
    finite = report.curves.loss[np.isfinite(report.curves.loss) & ~report.curves.undone()]
    if len(finite):
        shown += [(f"{finite[-1]:.4g}", "last finite loss"), (f"{finite.min():.4g}", "lowest loss")]
    return [*shown, (report.row_count, "rows")]


def _undone(number: int) -> str:
    return f", {number:,} of them undone" if number else ""


# -- the table of incidents ------------------------------------------------------------------------


def _cells(report: RunReport, incident: Incident) -> tuple[str, ...]:
    """Returns the cells of a row."""
    kind = report.outcome_text(incident.outcome)
    if incident.outcome is IncidentOutcome.ROLLBACK and incident.stopped:
        kind += f", then {report.outcome_text(IncidentOutcome.STOP)}"
    path = [f"{multiplier:.4g}" for multiplier in incident.lr_path]
    worst = incident.evidence[:_MAX_TENSORS]
    cells = (
        f"#{incident.number}: {kind}" if incident.number else kind,
        _step_range(incident.onset_step, incident.end),
        flag_names(incident.cause),
        outcome(incident),
        str(incident.skipped),
        " → ".join(path if len(path) < _MAX_CUTS else [path[0], "…", path[-1]]),
        _batches(incident),
        ", ".join(f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in worst),
    )
    return tuple(cell or _NOTHING for cell in cells)


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
