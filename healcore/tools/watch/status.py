"""The state of a run in three lines."""

from __future__ import annotations

from healcore.runtime.events.models import EventRecord
from healcore.tools.watch.state import LiveRun
from healcore.tools.watch.wording import plain


def lines(live: LiveRun) -> list[str]:
    """How the run stands; without what is not known."""
    run, ending, budget = live.run, live.ending, live.budget
    start = run.start or EventRecord()
    state = "running" if ending is None else f"ended: {ending}"
    head = [
        "completed" if ending == "completed" else state,
        f"step {live.step:,}" if live.step is not None else "",
        f"{live.speed:.3g} steps/s" if live.speed and ending is None else "",
        "" if start.policy is None else f"policy {start.policy}",
        "it only observes: nothing is done" if run.observes else "",
        start.framework or "",
    ]
    skipped = f"{run.skips}{' or more' if run.capped else ''} steps"
    done = [
        f"{skipped} skipped" if run.skips else "",
        _used("rollback", run.rollback_count, budget and budget.recoveries),
        _used("LR cut", run.cuts, budget and budget.lr_cuts),
    ]
    if run.observes:
        done = [_would(live, skipped)]
    good = f"last known-good: {_or_none(run.last_good)}"
    counts = [_incidents(live), *done, good]
    parts = [" · ".join(each for each in row if each) for row in (head, _numbers(live), counts)]
    return [plain(row) for row in parts if row]


def _numbers(live: LiveRun) -> list[str]:
    found = live.metrics
    limit = f" (limit {found['threshold']:.4g})" if "threshold" in found else ""
    scale = live.lr_scale
    return [
        f"loss {found['loss']:.5g}" if "loss" in found else "",
        f"gradient norm {found['grad_norm']:.4g}{limit}" if "grad_norm" in found else "",
        f"learning rate {'would be ' * live.run.observes}× {scale:.3g}"
        if scale is not None
        else "",
    ]


def _would(live: LiveRun, skipped: str) -> str:
    """What a policy that acts would have done."""
    run = live.run
    parts = [
        f"skipped {skipped}" if run.skips else "",
        f"gone back {_times(run.rollback_count)}" if run.rollback_count else "",
        f"cut the learning rate {_times(run.cuts)}" if run.cuts else "",
        "stopped" if run.stops else "",
    ]
    return f"it would have {', '.join(each for each in parts if each)}" if any(parts) else ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _incidents(live: LiveRun) -> str:
    count, onset = live.run.incident_count, live.run.last_seen.onset
    if not count:
        return "no incident"
    last = "" if onset is None else f", the last at step {onset:,}"
    return f"{count} incident{'s' * (count > 1)}{last}"


def _used(what: str, count: int, of: int | None) -> str:
    """How often; a budget is refunded after long health, of which there is no event."""
    budget = "" if of is None else f" (budget {of})"
    return f"{count} {what}{'s' * (count != 1)}{budget}"


def _or_none(step: int | None) -> str:
    return "none yet" if step is None else f"step {step:,}"
