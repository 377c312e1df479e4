"""Writes sentences about the events, incidents, states and counts of a run.

The report, `healcore events show` and trackers use these sentences. The
diagnosis at the end of a run is in `healcore.runtime.postmortem.diagnosis`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from healcore.console import counted
from healcore.core.verdict import Cause
from healcore.events.models import EventRecord
from healcore.history import Incident, Mode
from healcore.history.process import RunState
from healcore.runtime.faults import FAILURES
from healcore.runtime.incidents.rollback import Rollback

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


def flag_names(flags: Sequence[str]) -> str:
    """Names of causes or actions as text: "grad spike and loss spike"."""
    return " and ".join(name.lower().replace("_", " ") for name in flags)


def listed(names: Sequence[str]) -> str:
    """Names as text: "loss, norm and step"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def step_range(first: float, last: float) -> str:
    """A range of steps as text: "7" or "7–12"."""
    return f"{first:.0f}" if first == last else f"{first:.0f}–{last:.0f}"


# -- events ---------------------------------------------------------------------------------------


def sentence(event: EventRecord) -> str:
    """The sentence of an event, or an empty string if its kind has none."""
    write = _SENTENCES.get(event.kind)
    return write(event) if write else ""


def _start(event: EventRecord) -> str:
    observed = " (observes, changes nothing)" if event.mode == "observe" else ""
    framework = event.framework or ""
    return f"run {event.run} begins: {framework}, policy {_shown(event.policy)}{observed}"


def _alarm(event: EventRecord) -> str:
    numbers = event.readings
    seen = numbers and f"loss {numbers.loss:.4g}, gradient norm {numbers.grad_norm:.4g}"
    return "; ".join(
        filter(None, (flag_names(event.cause or ()), seen, "skipped" if event.skip else ""))
    )


def _order(event: EventRecord) -> str:
    would = "would order" if event.observed else "ordered"
    actions = ", ".join(flag_names([action]) for action in event.action or ())
    return f"{would}: {actions}" + (f" ({flag_names(event.cause)})" if event.cause else "")


def _rollback(event: EventRecord) -> str:
    number = len(event.batches or ())
    parts = (
        f"from step {event.step or 0} back to the checkpoint of step {_shown(event.checkpoint)}",
        Rollback.of(event).lr_text,
        f"{counted(number, 'batch', 'batches')} skipped" if number else "",
        (event.by == "earlier_weights" and event.why) or "",
        "the snapshot that the run started from" if event.initial else "",
        "the same checkpoint again, because none is older" if event.repeated else "",
    )
    return ", ".join(filter(None, parts))


def _lr(event: EventRecord) -> str:
    before, after = event.lr_scale_before, event.lr_scale
    if not before or not after:
        return "learning rate"
    would = "would be " if event.observed else ""
    why = f": {event.why}" if event.why else ""
    return f"learning rate {would}× {after:.3g}, was × {before:.3g}{why}"


_ASSESSMENTS = {
    ("unknown", "nothing"): "declined: no evidence that the current weights are worse",
    ("unknown", "budget"): "declined: the budget of rollbacks is exhausted",
    ("damage", "weights"): "evidence of damage: the weights are not finite",
    ("damage", "state"): "evidence of damage: the state is not finite",
    ("damage", "earlier_weights"): "evidence of damage: earlier weights are better",
    ("damage", "repetition"): "evidence of damage: steps are not finite again and again",
    ("worse", "earlier_weights"): "earlier weights are better; the run has time to recover",
    ("recovered", "earlier_weights"): "the run has recovered",
}
"""(`verdict`, `by`) of an event `assessment` -> sentence."""


def _assessment(event: EventRecord) -> str:
    found = f"assessment: {event.verdict or 'unknown'}"
    text = _ASSESSMENTS.get((event.verdict or "", event.by or ""), found)
    since = (
        "" if event.onset is None or event.verdict == "unknown" else f", since step {event.onset}"
    )
    return text + since


def _hook(event: EventRecord) -> str:
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    then = flag_names(event.action or ()) or "nothing"
    return f"the hook {event.hook or ''} changed {flag_names(event.ordered or ())} to {then}"


def _fault(event: EventRecord) -> str:
    """The type of failure, the exception and the response."""
    rows = [FAILURES[Cause[name]] for name in event.cause or () if name in Cause.__members__]
    kinds = ", ".join(f"{row.name} ({row.severity})" for row in rows)
    done = f"; {event.answer.replace('_', ' ')}" if event.answer else ""
    return f"fault: {kinds or 'unknown'}: {event.problem or ''}{done}"


def _shown(value: object) -> object:
    return "?" if value is None else value


_SENTENCES: dict[str, Callable[[EventRecord], str]] = {
    "start": _start,
    "resume": lambda event: f"resumed from the checkpoint of step {_shown(event.checkpoint)}",
    "alarm": _alarm,
    "incident": lambda event: (
        f"incident {_shown(event.incident)}: {flag_names(event.cause or ()) or 'unknown cause'}"
    ),
    "alert": lambda event: (
        f"{event.severity or 'alert'}: {flag_names(event.cause or ())}: {event.diagnosis or ''}"
    ),
    "order": _order,
    "assessment": _assessment,
    "rollback": _rollback,
    "lr": _lr,
    "vote": lambda event: f"the ranks agreed: {event.outcome or ''} ({event.why or ''})",
    "hook": _hook,
    "fault": _fault,
    "retried": lambda event: event.why or f"a call succeeded at attempt {_shown(event.attempt)}",
    "stop": lambda event: f"stopped: {event.why or ''}",
    "problem": lambda event: f"problem: {event.problem or ''}",
    "save_failed": lambda event: f"a checkpoint was not written: {event.problem or ''}",
    "damaged": lambda event: f"a checkpoint is damaged: {event.problem or ''}",
    "end": lambda event: f"end: {event.ending or 'unknown'}",
}


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
