"""How a run stands, from its events and its metrics as they come."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from healcore import policy as policies
from healcore.policy import Policy
from healcore.runtime.events import reading
from healcore.runtime.events.process import Process
from healcore.runtime.events.reading import Event
from healcore.tools.report import metric_lines
from healcore.tools.report.case import MOST_ALARMS
from healcore.tools.report.sound import number, sound

_TIMED = 200
"""Metrics lines over which the speed is taken."""

_BEHIND = frozenset({"good", "damaged", "save_failed"})
"""Told when a checkpoint's turn has come; their `step` is the checkpoint's, long gone by."""


class Budget(NamedTuple):
    """What a policy pays for."""

    recoveries: int
    lr_cuts: int
    refund_after: int


class Standing:
    """The last run that has begun in an events file; the first process of several.

    What is counted is of the whole run: a process that goes on from the checkpoints of the one
    before goes on counting.

    Args:
        policy: of the run, for its budget; None: the preset of that name, if it is just that.

    Attributes:
        seen: lines so far.
        damaged: of those, the ones that are no event.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._given = policy
        self.seen = self.damaged = 0
        self._begin({})

    def _begin(self, start: Event) -> None:
        self.incidents = self.rollbacks = self.cuts = self.skipped = self.stops = 0
        self.latest: int | None = None
        """Onset of the last incident."""
        self.capped = False
        """Some alarms may have no event of their own: `skipped` is the least."""
        self._alarms: Counter[tuple[str, int]] = Counter()
        self._good: set[int] = set()
        self._go_on(start)

    def _go_on(self, start: Event) -> None:
        """Another process of the run, or its first."""
        self.start = start
        self.run: str | None = start.get("run")
        self.step: int | None = None
        self.lr_scale: float | None = None
        self.ending: str | None = None
        self.budget = self._budget()
        self.metrics: dict[str, float] = {}
        """Of the last line of the metrics."""
        self._timed: deque[tuple[float, int]] = deque(maxlen=_TIMED)

    @property
    def observes(self) -> bool:
        """Whether nothing is done: what is counted would have been."""
        return self.start.get("mode") == "observe"

    # -- events ---------------------------------------------------------------------------------

    def take(self, line: bytes) -> Event | None:
        """Takes a line; the event in it, if it is of the run that is watched."""
        if not line.strip():
            return None
        self.seen += 1
        found = reading.parse(line)
        if isinstance(found, str):
            self.damaged += 1
            return None
        event, _ = sound(found)
        if event["kind"] == "start" and not event.get("rank"):
            if event.get("resumes"):
                self._go_on(event)
            else:
                self._begin(event)
        if self.run is None:  # the file's beginning was rotated away
            self.run = event["run"]
        if event["run"] != self.run:  # another rank's
            return None
        self._note(event)
        return event

    def _note(self, event: Event) -> None:
        kind, step = event["kind"], event["step"]
        if step is not None and kind not in _BEHIND:
            self.step = step
        if kind == "incident":
            self.incidents = max(self.incidents + 1, event.get("incident", 0))
            self.latest = event.get("onset", step)
        elif kind == "rollback":
            self.step = event.get("checkpoint", step)
            if event.get("outcome") != "trial":  # its number tells of those before a rotation
                self.rollbacks = max(self.rollbacks + 1, event.get("number", 0))
        elif kind == "order" and event.get("observed"):
            self.rollbacks += "ROLLBACK" in event.get("action", ())
            self.stops += "STOP" in event.get("action", ())
        elif kind == "alarm":
            self.skipped += event.get("skip", False)
            which = event["run"], event.get("incident", 0)
            self._alarms[which] += 1
            self.capped |= self._alarms[which] >= MOST_ALARMS
        elif kind == "lr":
            before, after = number(event, "lr_scale_before"), number(event, "lr_scale")
            self.cuts += before is not None and after is not None and after < before
        elif kind == "end":
            self.ending = event.get("ending", "not told")
            self.rollbacks = max(self.rollbacks, event.get("rollbacks", 0))
            self.incidents = max(self.incidents, event.get("incidents", 0))
        if "lr_scale" in event:
            self.lr_scale = number(event, "lr_scale")
        self._note_checkpoint(kind, event.get("checkpoint", step))
        if "last_good" in event:
            self._good.add(event["last_good"])

    def _note_checkpoint(self, kind: str, checkpoint: int | None) -> None:
        if checkpoint is not None and kind == "good":
            self._good.add(checkpoint)
        elif checkpoint is not None and kind in ("quarantine", "damaged"):
            self._good.discard(checkpoint)

    # -- metrics --------------------------------------------------------------------------------

    def take_metrics(self, line: bytes) -> None:
        """Takes a line of the metrics; those of other runs are passed over."""
        found = metric_lines.parse(line)
        if isinstance(found, str) or found.get("run") != self.run:
            return
        step = found["step"]
        self.metrics = metric_lines.numbers(found)
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
    def last_good(self) -> int | None:
        """Step of the newest known-good checkpoint."""
        return max(self._good, default=None)

    @property
    def failed(self) -> bool:
        """Whether the run has ended, and not as it was meant to."""
        return self.ending not in (None, "completed")

    def is_gone(self) -> bool:
        """Whether its process has gone without a word; False where that cannot be seen."""
        start = self.start
        if self.ending is not None or "host" not in start or "pid" not in start:
            return False
        process = Process(start["host"], start["pid"], start.get("boot"), start.get("born"))
        return process.gone() is True

    def _budget(self) -> Budget | None:
        name, ran = self.start.get("policy"), self.start.get("fingerprint")
        policy = self._given
        if policy is None and name in policies.preset_names():
            preset = policies.load(name)
            policy = preset if policies.fingerprint(preset) == ran else None
        if policy is None:
            return None
        budget = policy.budget
        return Budget(int(budget.recoveries), int(budget.lr_cuts), int(budget.refund_after))
