"""How a run stands, from its events and its metrics as they come."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from healcore import policy as policies
from healcore.history import Run
from healcore.history.metrics import curve_values, parse_metrics
from healcore.history.process import RunState
from healcore.history.run import is_continuation
from healcore.policy import Policy
from healcore.runtime.events import log
from healcore.runtime.events.models import EventRecord

_TIMED = 200
"""Metrics lines over which the speed is taken."""


class Budget(NamedTuple):
    """What a policy grants."""

    recoveries: int
    lr_cuts: int


class LiveRun:
    """The last run that has begun in an events file; the first process of several.

    What is counted is of the whole run: a process that goes on from the checkpoints of the one
    before goes on counting.

    Args:
        policy: of the run, for its budget; None: the preset of that name, if it is just that.

    Attributes:
        run: what its events have.
        seen: lines so far.
        damaged: of those, the ones that are no event.
        killed: its process is gone, and has written no end.
        step: where it is.
        lr_scale: the multiplier of the learning rate in force.
        metrics: of the last line of the metrics.
        budget: of the run's policy; None: it is not known.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._given = policy
        self.seen = self.damaged = 0
        self.run = Run()
        self._begin_process(None)

    def _begin_process(self, run: str | None) -> None:
        self._id = run
        self.killed = False
        self.step: int | None = None
        self.lr_scale: float | None = None
        self.metrics: dict[str, float] = {}
        self.budget = _budget(self._given)
        self._timed: deque[tuple[float, int]] = deque(maxlen=_TIMED)

    # -- events ---------------------------------------------------------------------------------

    def take(self, line: bytes) -> EventRecord | None:
        """Takes a line; the event in it, if it is of the run that is watched."""
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
        if event["run"] != self._id:  # another rank's
            return None
        found = self.run.add(event)
        if found.kind == "start":
            self.budget = _budget(self._given or _preset(found))
        self.step, self.lr_scale = self.run.step, self.run.lr_scale
        return found

    # -- metrics --------------------------------------------------------------------------------

    def take_metrics(self, line: bytes) -> None:
        """Takes a line of the metrics; those of other runs are passed over."""
        found = parse_metrics(line)
        if isinstance(found, str) or found.get("run") != self._id:
            return
        step = found["step"]
        self.metrics = curve_values(found)
        if self.ending is None:
            self.step = step
        self.lr_scale = self.metrics.get("lr_scale", self.lr_scale)
        time = found.get("time")
        if type(time) is float:
            if self._timed and step < self._timed[-1][1]:
                self._timed.clear()
            self._timed.append((time, step))

    @property
    def speed(self) -> float | None:
        """Steps per second, lately; None: not known."""
        if len(self._timed) < 2:
            return None
        (t0, step0), (t1, step1) = self._timed[0], self._timed[-1]
        return (step1 - step0) / (t1 - t0) if t1 > t0 else None

    # -- what follows from it -------------------------------------------------------------------

    @property
    def ending(self) -> RunState | None:
        """How it has ended; None: it has not, as far as is known."""
        if self.killed:
            return RunState.KILLED
        return None if self.run.end is None else self.run.state

    @property
    def failed(self) -> bool:
        """Whether the run has ended, and not as it was meant to."""
        return self.ending not in (None, RunState.COMPLETED)

    def note_if_gone(self) -> bool:
        """Whether its process has gone without an event; False where that cannot be seen."""
        self.killed = self.run.state is RunState.GONE
        return self.killed


def _budget(policy: Policy | None) -> Budget | None:
    if policy is None:
        return None
    return Budget(int(policy.budget.recoveries), int(policy.budget.lr_cuts))


def _preset(start: EventRecord) -> Policy | None:
    """The run's policy, if it is just the preset of its name."""
    if start.policy not in policies.preset_names():
        return None
    preset = policies.load(start.policy)
    return preset if policies.fingerprint(preset) == start.fingerprint else None
