"""Follows the state of a live run by its events and its metrics."""

from __future__ import annotations

from collections import deque

from healcore import policy as policies
from healcore.events import log
from healcore.events.models import EventRecord
from healcore.history import Run
from healcore.history.metrics import curve_values, parse_metrics
from healcore.history.process import RunState
from healcore.history.run import is_continuation
from healcore.policy import Policy
from healcore.tools.report.runs import policy_text

_TIMED = 200
"""Metrics lines over which the speed is measured."""


class LiveRun:
    """The last run that has begun in an events file; the first process of several.

    A process that resumes from the checkpoints of the one before continues its counts. The policy
    is None if it is not given and not in the events. `damaged` counts the lines of `seen` that
    are not an event; `killed`: the process is gone, and has written no end.
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
        """Adds a line of the events; returns the event if it is of the watched run."""
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
        if self._id is None:  # the file's beginning was rotated away
            self._id = event["run"]
        if event["run"] != self._id:  # of another rank
            return None
        found = self.run.add(event)
        if found.kind == "start" and self._given is None:
            self.policy = _policy_of(found)
        return found

    def add_metrics(self, line: bytes) -> None:
        """Adds a line of the metrics, which are newer than the events; others' are ignored."""
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
        """Recent steps per second; None: not known."""
        if len(self._timed) < 2:
            return None
        (t0, step0), (t1, step1) = self._timed[0], self._timed[-1]
        return (step1 - step0) / (t1 - t0) if t1 > t0 else None

    @property
    def ending(self) -> RunState | None:
        """How it has ended; None: it has not, as far as is known."""
        if self.killed:
            return RunState.KILLED
        return None if self.run.end is None else self.run.state

    @property
    def failed(self) -> bool:
        """Whether the run has ended in any other way than completed."""
        return self.ending not in (None, RunState.COMPLETED)

    def check_process(self) -> bool:
        """Whether its process has gone without an event; False if that cannot be checked."""
        self.killed = self.run.state is RunState.GONE
        return self.killed


def _policy_of(start: EventRecord) -> Policy | None:
    text = policy_text(start.policy or "", start.fingerprint or "", start.policy_toml or "")
    try:
        return policies.loads(text) if text else None
    except policies.PolicyError:  # of a newer healcore
        return None
