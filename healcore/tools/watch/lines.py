"""Writes a line for each event of a live run, and three lines for its state."""

from __future__ import annotations

from healcore.console import counted
from healcore.events.models import EventRecord
from healcore.runtime.postmortem.diagnosis import why_none_is_good
from healcore.runtime.sentences import sentence
from healcore.tools.terminal import clean
from healcore.tools.watch.live_run import LiveRun


def one_line(text: str) -> str:
    """The text in one line, without terminal escape sequences."""
    return clean(" ".join(text.split()), keep="")


# -- events ----------------------------------------------------------------------------------------


def event_line(event: EventRecord) -> str | None:
    """The line of an event, or None for one that is not shown."""
    text = "" if event.kind == "alarm" else sentence(event)  # a run may have alarms by thousands
    if not text:
        return None
    step = "-" if event.step is None else event.step
    return one_line(f"{(event.time or '')[11:19]:8} {step:>8}  {text}")


# -- the state -------------------------------------------------------------------------------------


def state_lines(live: LiveRun) -> list[str]:
    """The state of the run in three lines, without unknown values."""
    run, ending = live.run, live.ending
    start = run.start or EventRecord()
    state = "running" if ending is None else f"ended: {ending}"
    head = [
        "completed" if ending == "completed" else state,
        f"step {live.run.step:,}" if live.run.step is not None else "",
        f"{live.speed:.3g} steps/s" if live.speed and ending is None else "",
        "" if start.policy is None else f"policy {start.policy}",
        "it only observes: nothing is done" if run.observes else "",
        start.framework or "",
    ]
    good = f"step {run.last_good:,}" if run.last_good is not None else _none_good(live)
    counts = [_incidents(live), *_actions(live), f"last known-good: {good}"]
    rows = [" · ".join(filter(None, row)) for row in (head, _numbers(live), counts)]
    return [one_line(row) for row in rows if row]


def _none_good(live: LiveRun) -> str:
    if live.policy is None:
        return "none yet" if live.ending is None else "none"
    if live.ending is None:
        return f"none yet, it takes {live.policy.rollback.probation} healthy steps"
    return f"none{why_none_is_good(live.run.step or 0, live.policy.rollback.probation)}"


def _numbers(live: LiveRun) -> list[str]:
    found = live.metrics
    limit = f" (limit {found['threshold']:.4g})" if "threshold" in found else ""
    would = "would be " if live.run.observes else ""
    return [
        f"loss {found['loss']:.5g}" if "loss" in found else "",
        f"gradient norm {found['grad_norm']:.4g}{limit}" if "grad_norm" in found else "",
        "" if live.run.lr_scale is None else f"learning rate {would}× {live.run.lr_scale:.3g}",
    ]


def _incidents(live: LiveRun) -> str:
    count, newest = live.run.incident_count, live.run.last_incident
    if not count:
        return "no incident"
    undone = _undone(live.run.undone_incidents)
    last = f", the last at step {newest.onset_step:,.0f}" if newest else ""
    return f"{counted(count, 'incident')}{undone}{last}"


def _actions(live: LiveRun) -> list[str]:
    """What was done, or would have been. The budgets are totals, since refunds have no event."""
    run = live.run
    skipped = f"{run.skips}{' or more' if run.capped else ''} steps"
    if run.observes:
        parts = [
            f"skipped {skipped}" if run.skips else "",
            f"rolled back {_times(run.rollback_count)}" if run.rollback_count else "",
            f"cut the learning rate {_times(run.cuts)}" if run.cuts else "",
            "stopped" if run.stops else "",
        ]
        return [f"it would have {', '.join(filter(None, parts))}"] if any(parts) else []
    budget = live.policy.budget if live.policy else None
    recoveries = f" (budget {int(budget.recoveries)})" if budget else ""
    cuts = f" (budget {int(budget.lr_cuts)})" if budget else ""
    return [
        f"{skipped} skipped{_undone(run.undone_skips)}" if run.skips else "",
        counted(run.rollback_count, "rollback") + recoveries,
        counted(run.cuts, "LR cut") + cuts,
    ]


def _undone(number: int) -> str:
    return f" ({number} undone)" if number else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
