"""Describes incidents, events and counts of a run in words."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.console import counted
from healcore.core.verdict import Cause
from healcore.history import Counts, Incident, Mode
from healcore.history.process import RunState
from healcore.history.run import Mark
from healcore.runtime.events.models import EventRecord, RollbackOutcome
from healcore.runtime.faults import FAILURES

STATES = {
    RunState.COMPLETED: "completed",
    RunState.STOPPED: "stopped by the policy",
    RunState.EXCEPTION: "ended by an exception",
    RunState.SIGNAL: "ended by a signal",
    RunState.INTERRUPTED: "interrupted from the keyboard",
    RunState.KILLED: "killed",
    RunState.ENDED: "ended",
    RunState.GONE: "killed: it wrote no end, and its process is gone",
    RunState.RUNNING: "still running",
    RunState.UNKNOWN: "not known: still running, or killed",
}


def flag_names(flags: Sequence[str]) -> str:
    """Causes or actions: "grad spike and loss spike"."""
    return " and ".join(name.lower().replace("_", " ") for name in flags)


def fault_text(event: EventRecord) -> str:
    """An exception, what it is by the table of failures, and what was done about it."""
    causes = [Cause[name] for name in event.cause or () if name in Cause.__members__]
    kinds = ", ".join(f"{FAILURES[each].name} ({FAILURES[each].severity})" for each in causes)
    done = f"; {event.answer.replace('_', ' ')}" if event.answer else ""
    return f"step {event.step}: {kinds or 'not known'}: {event.problem}{done}"


def listed(names: Sequence[str]) -> str:
    """One, two and three."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def step_range(first: float, last: float) -> str:
    """One step, or the first and the last."""
    return f"{first:.0f}" if first == last else f"{first:.0f}–{last:.0f}"


# -- incidents ------------------------------------------------------------------------------------


def outcome(incident: Incident) -> str:
    """The outcome of an incident."""
    if incident.mode is Mode.REPLAY:
        return _replayed(incident)
    measures = [_measure(each) for each in incident.measures]
    if incident.mode is Mode.OBSERVE:
        return "; ".join([f"observed only: nothing was done{_would(incident)}", *measures])
    if measures:
        return "; ".join(measures)
    return (
        f"skipped {_skipped(incident)}, then training went on"
        if incident.skipped
        else "training went on"
    )


def _measure(event: EventRecord) -> str:
    match event.kind:
        case "rollback":
            return trial(event) or _rollback(event)
        case "hook":
            return _hook(event)
        case "verdict":
            return rerun_verdict(event)
    return f"stopped the run: {event.why or ''}"


def trial(event: EventRecord) -> str:
    """The text of a rollback that was only a trial; empty for any other."""
    if event.outcome != RollbackOutcome.TRIAL:
        return ""
    return f"replayed from step {event.checkpoint}, to see whether it happens again"


def rerun_verdict(event: EventRecord) -> str:
    """What the re-run of a step showed."""
    return f"the re-run showed it to be {event.outcome or '?'}"


def _rollback(event: EventRecord) -> str:
    parts = (
        f"from step {event.step or 0} back to the checkpoint of step {event.checkpoint}",
        "finished by the next process" if event.outcome == RollbackOutcome.AFTER_CRASH else "",
        "the snapshot that the run started from" if event.initial else "",
        "again: there is nothing older" if event.repeated else "",
    )
    return ", ".join(part for part in parts if part)


def _hook(event: EventRecord) -> str:
    if event.problem is not None:
        return f"a hook failed: {event.problem}"
    then = flag_names(event.action or ()) or "nothing"
    return f"the hook {event.hook or ''} changed {flag_names(event.ordered or ())} to {then}"


def _skipped(incident: Incident) -> str:
    return f"{counted(incident.skipped, 'step')}{' or more' if incident.capped else ''}"


def _would(incident: Incident) -> str:
    parts = [f"skipped {_skipped(incident)}"] if incident.skipped else []
    if "ROLLBACK" in incident.action:
        times = "once" if incident.repeats == 1 else f"{incident.repeats} times"
        more = f" ({times} more if that had not helped)" if incident.repeats else ""
        parts.append(f"rolled back{more}")
    if incident.stop_step is not None:
        parts.append(f"stopped the run at step {incident.stop_step:.0f}")
    return f"; it would have {', '.join(parts)}" if parts else ""


def _replayed(incident: Incident) -> str:
    parts: list[str] = []
    if incident.denied:
        parts.append("a rollback was due and none was left: the run would stop")
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


# -- the run --------------------------------------------------------------------------------------


def mark(mark: Mark) -> str:
    """What happened at a place on the axis."""
    event = mark.event
    if event is None:
        return "a live run would have ended here"
    match mark.kind:
        case "resume":
            return f"resumed from the checkpoint of step {mark.step:g}"
        case "alarm":
            return flag_names(event.cause or ())
        case "order":
            return f"{flag_names(event.action or ())} ordered: {flag_names(event.cause or ())}"
        case "hook":
            return _hook(event)
        case "stop":
            return f"stopped: {event.why or ''}"
    return f"end: {event.ending or 'not known'}"


def repeats(counts: Counts, *, would: bool) -> str:
    """Rollbacks beyond one for each incident; empty: there are none."""
    why = "more if rollbacks had not helped" if would else "again in the same incident"
    parts = [f"and {counts.repeats} {why}"] if counts.repeats else []
    parts += [f"{counts.denied} beyond the budget"] if counts.denied else []
    return ", ".join(parts)
