"""Writes the states and the incidents of a run as text, for the report.

Sentences about events are in `healcore.events.schema`; the diagnosis at the end of a run is in
`healcore.runtime.postmortem.diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

from healcore.console import counted
from healcore.events.schema import flag_names as flag_names
from healcore.events.schema import sentence as sentence
from healcore.history import Incident, Mode
from healcore.history.process import RunState

STATES = {
    RunState.COMPLETED: "completed",
    RunState.STOPPED: "stopped by the policy",
    RunState.EXCEPTION: "ended by an exception",
    RunState.SIGNAL: "ended by a signal",
    RunState.INTERRUPTED: "interrupted from the keyboard",
    RunState.KILLED: "killed",
    RunState.ENDED: "ended",
    RunState.GONE: "killed: the process is gone, and there is no end event",
    RunState.RUNNING: "still running",
    RunState.UNKNOWN: "unknown: still running, or killed",
}


def listed(names: Sequence[str]) -> str:
    """Names as text: "loss, norm and step"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def step_range(first: float, last: float) -> str:
    """A range of steps as text: "7" or "7–12"."""
    return f"{first:.0f}" if first == last else f"{first:.0f}–{last:.0f}"


# -- incidents ------------------------------------------------------------------------------------


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
