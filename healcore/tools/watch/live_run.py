"""Follows the state of a live run by its events and metrics, and describes it in lines."""

from __future__ import annotations

from collections import deque

from healcore import policy as policies
from healcore.console import counted
from healcore.events import log
from healcore.events.models import EventRecord
from healcore.history import Run
from healcore.history.metrics import curve_values, parse_metrics
from healcore.history.process import RunState
from healcore.history.run import is_continuation
from healcore.policy import Policy
from healcore.runtime.postmortem.diagnosis import why_none_is_good
from healcore.runtime.postmortem.sentences import sentence
from healcore.tools.report.runs import policy_text
from healcore.tools.terminal import clean

_TIMED = 200
"""Metrics lines over which the speed is measured."""


class LiveRun:
    """The newest run in an events file, as rank 0 sees it.

    A process that resumes from the checkpoints of the process before continues its counts. `policy`
    is None if it is not given and not in the events. `seen` counts lines, and `damaged` the lines
    that are not an event. `killed` is whether the process is gone without an event `end`.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._given = policy
        self.seen = self.damaged = 0
        self.run = Run()
        self._begin_process(None)

    def _begin_process(self, run: str | None) -> None:
        self._id = run
        self.killed = False
        self.metrics: dict[str, float] = {}
        self.policy = self._given
        self._timed: deque[tuple[float, int]] = deque(maxlen=_TIMED)

    def add_event(self, line: bytes) -> EventRecord | None:
        """Adds a line of the events. Returns the event if it belongs to the watched run."""
        if not line.strip():
            return None
        self.seen += 1
        event = log.parse(line)
        if isinstance(event, str):
            self.damaged += 1
            return None
        if event["kind"] == "start" and not event.get("rank"):
            if not is_continuation([event]):
                self.run = Run()
            self._begin_process(event["run"])
        if self._id is None:  # the first lines were rotated away
            self._id = event["run"]
        if event["run"] != self._id:  # another rank
            return None
        found = self.run.add(event)
        if found.kind == "start" and self._given is None:
            self.policy = _policy_of(found)
        return found

    def add_metrics(self, line: bytes) -> None:
        """Adds a line of the metrics. Ignores lines of other runs."""
        found = parse_metrics(line)
        if isinstance(found, str) or found.get("run") != self._id:
            return
        step = found["step"]
        self.metrics = curve_values(found)
        if self.ending is None:
            self.run.step = step + 1  # steps done
        self.run.lr_scale = self.metrics.get("lr_scale", self.run.lr_scale)
        time = found.get("time")
        if type(time) is float:
            if self._timed and step < self._timed[-1][1]:
                self._timed.clear()
            self._timed.append((time, step))

    @property
    def speed(self) -> float | None:
        """Recent steps per second, or None if unknown."""
        if len(self._timed) < 2:
            return None
        (t0, step0), (t1, step1) = self._timed[0], self._timed[-1]
        return (step1 - step0) / (t1 - t0) if t1 > t0 else None

    @property
    def ending(self) -> RunState | None:
        """How the run ended, or None before the end."""
        if self.killed:
            return RunState.KILLED
        return None if self.run.end is None else self.run.state

    @property
    def failed(self) -> bool:
        """Whether the run has ended without completing."""
        return self.ending not in (None, RunState.COMPLETED)

    def check_process(self) -> bool:
        """Whether the process is gone without an event; False if that cannot be checked."""
        self.killed = self.run.state is RunState.GONE
        return self.killed


def _policy_of(start: EventRecord) -> Policy | None:
    text = policy_text(start.policy or "", start.fingerprint or "", start.policy_toml or "")
    try:
        return policies.loads(text) if text else None
    except policies.PolicyError:  # written by a newer healcore
        return None


# -- text -----------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """Puts the text in one line, and escapes terminal sequences."""
    return clean(" ".join(text.split()), keep="")


# -- events ----------------------------------------------------------------------------------------


def event_line(event: EventRecord) -> str | None:
    """The line of an event, or None for an event that is not shown."""
    text = "" if event.kind == "alarm" else sentence(event)  # there may be thousands of alarms
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
        "it only observes" if run.observes else "",
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
    """Skips, rollbacks and cuts. Budgets are totals, because refunds have no event."""
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
