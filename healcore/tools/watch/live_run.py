"""Tracks the state of a live run by its events and metrics, and describes the state in lines."""

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
from healcore.runtime.postmortem.diagnosis import why_no_good_checkpoint
from healcore.runtime.postmortem.sentences import sentence
from healcore.tools.report.runs import policy_text
from healcore.tools.terminal import clean

_SPEED_LINES = 200
"""Number of metrics lines over which the speed is measured."""


class LiveRun:
    """The newest run in an events file, as rank 0 sees it.

    The counts of a resumed run include its earlier processes.

    Attributes:
        metrics: name -> value in the newest metrics line.
        policy: policy of the run, or None if unknown.
        lines, damaged: number of lines in the events file, and of lines without an event.
        killed: whether the process is gone without an event `end`.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._user_policy = policy
        self.lines = self.damaged = 0
        self.run = Run()
        self._begin_process(None)

    def _begin_process(self, run: str | None) -> None:
        self._id = run
        self.killed = False
        self.metrics: dict[str, float] = {}
        self.policy = self._user_policy
        self._times: deque[tuple[float, int]] = deque(maxlen=_SPEED_LINES)
        """Wall time and step of recent metrics lines."""

    def add_event(self, line: bytes) -> EventRecord | None:
        """Adds a line of the events file. Returns the event if it belongs to the watched run."""
        if not line.strip():
            return None
        self.lines += 1
        event = log.parse(line)
        if isinstance(event, str):
            self.damaged += 1
            return None
        if event["kind"] == "start" and not event.get("rank"):
            if not is_continuation([event]):
                self.run = Run()
            self._begin_process(event["run"])
        if self._id is None:  # a rotation removed the event `start`
            self._id = event["run"]
        if event["run"] != self._id:  # another rank
            return None
        record = self.run.add(event)
        if record.kind == "start" and self._user_policy is None:
            self.policy = _load_policy(record)
        return record

    def add_metrics(self, line: bytes) -> None:
        """Adds a line of the metrics file. Ignores lines of other runs."""
        fields = parse_metrics(line)
        if isinstance(fields, str) or fields.get("run") != self._id:
            return
        step = fields["step"]
        self.metrics = curve_values(fields)
        if self.ending is None:
            self.run.step = step + 1  # steps done
        self.run.lr_scale = self.metrics.get("lr_scale", self.run.lr_scale)
        time = fields.get("time")
        if type(time) is float:
            if self._times and step < self._times[-1][1]:
                self._times.clear()
            self._times.append((time, step))

    @property
    def speed(self) -> float | None:
        """Recent steps per second, or None if unknown."""
        if len(self._times) < 2:
            return None
        (t0, step0), (t1, step1) = self._times[0], self._times[-1]
        return (step1 - step0) / (t1 - t0) if t1 > t0 else None

    @property
    def ending(self) -> RunState | None:
        """How the run ended, or None if it has not ended."""
        if self.killed:
            return RunState.KILLED
        return None if self.run.end is None else self.run.state

    @property
    def failed(self) -> bool:
        """Whether the run has ended without completing."""
        return self.ending not in (None, RunState.COMPLETED)

    def check_process(self) -> bool:
        """Returns `killed` after checking the process. False if the process cannot be checked."""
        self.killed = self.run.state is RunState.GONE
        return self.killed


def _load_policy(start: EventRecord) -> Policy | None:
    text = policy_text(start.policy or "", start.fingerprint or "", start.policy_toml or "")
    try:
        return policies.loads(text) if text else None
    except policies.PolicyError:  # from a newer healcore
        return None


def one_line(text: str) -> str:
    """Joins the lines of a text, and escapes terminal control sequences."""
    return clean(" ".join(text.split()), keep="")


def event_line(event: EventRecord) -> str | None:
    """Returns the line for an event, or None if the event is not shown."""
    text = "" if event.kind == "alarm" else sentence(event)  # a run may have thousands of alarms
    if not text:
        return None
    step = "-" if event.step is None else event.step
    return one_line(f"{(event.time or '')[11:19]:8} {step:>8}  {text}")


def state_lines(live: LiveRun) -> list[str]:
    """Returns the state of the run in three lines, without unknown values."""
    run, ending = live.run, live.ending
    start = run.start or EventRecord()
    state = "running" if ending is None else f"ended: {ending}"
    head = [
        "completed" if ending == "completed" else state,
        f"step {live.run.step:,}" if live.run.step is not None else "",
        f"{live.speed:.3g} steps/s" if live.speed and ending is None else "",
        "" if start.policy is None else f"policy {start.policy}",
        "observe mode" if run.observes else "",
        start.framework or "",
    ]
    good = f"step {run.last_good:,}" if run.last_good is not None else _no_known_good(live)
    counts = [_incidents(live), *_actions(live), f"last known-good: {good}"]
    rows = [" · ".join(filter(None, row)) for row in (head, _numbers(live), counts)]
    return [one_line(row) for row in rows if row]


def _no_known_good(live: LiveRun) -> str:
    if live.policy is None:
        return "none yet" if live.ending is None else "none"
    if live.ending is None:
        return f"none yet, needs {live.policy.rollback.probation} healthy steps"
    return f"none{why_no_good_checkpoint(live.run.step or 0, live.policy.rollback.probation)}"


def _numbers(live: LiveRun) -> list[str]:
    metrics = live.metrics
    limit = f" (limit {metrics['threshold']:.4g})" if "threshold" in metrics else ""
    would = "would be " if live.run.observes else ""
    return [
        f"loss {metrics['loss']:.5g}" if "loss" in metrics else "",
        f"gradient norm {metrics['grad_norm']:.4g}{limit}" if "grad_norm" in metrics else "",
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
    """Describes skips, rollbacks and cuts. Budgets are totals, because refunds have no event."""
    run = live.run
    skipped = f"{counted(run.skips, 'step')}{' or more' if run.capped else ''}"
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
