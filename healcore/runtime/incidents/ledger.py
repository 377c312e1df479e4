"""`Ledger`: the unhealthy steps, incidents and rollbacks of a run. `RunMetrics`: its counts.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict

from healcore.core.step_record import StepRecord
from healcore.core.verdict import NONFINITE, Action, Cause, names
from healcore.runtime.recovery.orders import HealthyRange, RollbackRecord

_MAX_INCIDENTS = 1000
"""Max incidents in the ledger; the oldest are dropped."""


@dataclass
class IncidentRecord:
    """One incident, from the step of its first alarm (`onset`) to its latest alarm (`last`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    number: int
    """Number of the incident, from 1 over the whole run. A rollback does not reset the count."""
    onset: int
    last: int
    cause: int
    """`Cause` flags of all alarms."""
    first: dict[str, int] = field(default_factory=dict)
    """Name of a cause -> first step with this cause."""
    alarms: int = 0
    skips: int = 0
    rollbacks: int = 0
    lr_scale: float = 1.0
    """Learning-rate multiplier after the latest alarm."""
    over: bool = False
    undone: bool = False
    """Whether a later rollback has undone the onset."""
    number_in_engine: int = 0
    """The engine's number of this incident, or -1 if the engine's count has restarted since."""

    @property
    def only_skips(self) -> bool:
        """Whether each alarm is a skipped step that was not finite, which changed no weights."""
        return self.skips == self.alarms and not Cause(self.cause) & ~NONFINITE

    def add(self, index: int, causes: int) -> None:
        """Adds an alarm at a step, with its `Cause` flags."""
        self.last, self.alarms, self.cause = index, self.alarms + 1, self.cause | causes
        for name in names(Cause(causes)):
            self.first.setdefault(name, index)


@dataclass
class Ledger:
    """The host's record of a run. `record` adds the steps in order."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    next_step: int = 0
    unhealthy: list[int] = field(default_factory=list)
    """Steps that were skipped or not taken or had an alarm within an incident, and the micro-steps
    right after such a step; ascending."""
    incidents: list[IncidentRecord] = field(default_factory=list)
    rollbacks: list[RollbackRecord] = field(default_factory=list)  # see `RollbackRecord.outline`
    incident_count: int = 0  # including undone and dropped incidents
    undone_incidents: int = 0  # whose onset a later rollback has undone
    skips: int = 0  # skipped steps so far, including undone steps
    undone_skips: int = 0
    untrained: int = 0  # steps in which no optimizer took a step, excluding undone steps
    open: bool = False  # whether an incident with more than skipped non-finite steps is open
    accepted: int = 0  # places accepted in a row: the trouble came back after all that was tried
    accepted_until: int = 0  # step before which no comparison rolls back again
    numbers: dict[str, HealthyRange] = field(default_factory=dict)
    """Number of an optimizer -> its healthy values. The driver holds it in them."""

    def record(
        self, index: int, records: Sequence[StepRecord], acted_on: int = -1
    ) -> IncidentRecord | None:
        """Adds the records of one step. Returns the incident of the step, or None.

        `acted_on` has the `Cause` flags that open an incident; all other alarms only alert.
        """
        self.next_step = index + 1
        if not any(each.judged for each in records):
            if not records[0].taken:
                self.unhealthy.append(index)
                self.skips += 1
                self.untrained += 1
                return None
            # A micro-step of an optax.MultiSteps around protect neither ends an incident nor a row
            # of unhealthy steps: the next update decides.
            if self.unhealthy and self.unhealthy[-1] == index - 1:
                self.unhealthy.append(index)
            return None
        self.open = any(each.incident_open for each in records)
        cause = 0
        for each in records:
            # An alert alone (a clipped gradient spike) opens no incident.
            if each.incident_open or each.skip:
                cause |= int(each.cause) & acted_on
        if not cause:
            if self.incidents and not self.open:
                self.incidents[-1].over = True
            return None
        self.unhealthy.append(index)
        skip = any(each.skip for each in records)
        incident = self._current(index, records, skip and not Cause(cause) & ~NONFINITE)
        incident.add(index, cause)
        incident.skips += skip
        self.skips += skip
        self.untrained += all(each.skip for each in records)
        incident.lr_scale = min((each.lr_scale for each in records), default=incident.lr_scale)
        return incident

    def _current(self, index: int, records: Sequence[StepRecord], harmless: bool) -> IncidentRecord:
        """Finds or opens an alarm's incident. An incident of skips only takes no other alarms."""
        last = self.incidents[-1] if self.incidents else None
        number = max(each.incident for each in records)
        if last is not None and last.only_skips:
            same = harmless and number == last.number_in_engine
        else:
            same = last is not None and not last.over
        if last is None or not same:
            if last is not None:
                last.over = True
            self.incident_count += 1
            last = IncidentRecord(self.incident_count, index, index, 0, number_in_engine=number)
            self.incidents.append(last)
            del self.incidents[:-_MAX_INCIDENTS]
        last.over = False
        return last

    def same_trouble(self, onset: int, within: int = 0) -> list[RollbackRecord]:
        """Earlier rollbacks for the trouble that begins at step `onset`, oldest first.

        The trouble is the same if its onset is at most `within` steps after the step at which the
        rollback began.
        """
        return [each for each in self.rollbacks if onset <= each.step + within]

    def unhealthy_between(self, first: int, end: int) -> list[int]:
        """Unhealthy steps from `first` to before `end`."""
        steps = self.unhealthy
        return steps[bisect.bisect_left(steps, first) : bisect.bisect_left(steps, end)]

    def healthy_steps(self, first: int, end: int) -> int:
        """Number of healthy steps from `first` to before `end`.

        Unhealthy steps do not restart the count: otherwise no checkpoint would become known-good in
        a run that skips a bad batch now and then.
        """
        return end - first - len(self.unhealthy_between(first, end))

    def first_consecutive(self, index: int) -> int:
        """First of the consecutive unhealthy steps that end at step `index`."""
        at = bisect.bisect_right(self.unhealthy, index)
        while at > 0 and self.unhealthy[at - 1] == index:
            at, index = at - 1, index - 1
        return index + 1

    def on_rollback(self, rollback: RollbackRecord, saved: Ledger | None) -> None:
        """Records an applied rollback; `saved` is the ledger in the restored checkpoint."""
        self.rollbacks.append(rollback.outline())
        held: dict[str, HealthyRange | None] = {**self.numbers}
        for each in self.rollbacks:  # a hold that has ended may begin again in repeated steps
            repeated = each.step >= rollback.target
            held |= {name: n for name, n in each.numbers.items() if n is None or repeated}
        self.numbers = {name: each for name, each in held.items() if each is not None}
        self._rewind(rollback.target, saved)
        if self.incidents:
            self.incidents[-1].rollbacks += 1

    def forget(self, before: int) -> None:
        """Drops unhealthy steps before a step, except consecutive ones up to the newest step."""
        before = min(before, self.first_consecutive(self.next_step - 1))
        del self.unhealthy[: bisect.bisect_left(self.unhealthy, before)]

    def continue_from(self, other: Ledger, step: int, saved: Ledger | None) -> None:
        """Continues an earlier process's ledger from a checkpoint of `step` that holds `saved`."""
        vars(self).update(vars(other))
        self._rewind(step, saved)

    def _rewind(self, step: int, saved: Ledger | None) -> None:
        self.next_step, self.open = step, False
        del self.unhealthy[bisect.bisect_left(self.unhealthy, step) :]
        if self.incidents:
            self.incidents[-1].over, self.incidents[-1].number_in_engine = True, -1
        for incident in self.incidents:
            if incident.onset >= step and not incident.undone:
                incident.undone = True
                self.undone_incidents += 1
        if saved is not None:  # skips before the checkpoint are not undone
            self.undone_skips = self.skips - (saved.skips - saved.undone_skips)
            self.untrained = saved.untrained


COUNTS = ("clips", "skips", "lr_cuts", "rollbacks", "alarms")
"""Counts since the run began: keys of an engine's `tally`."""
_OF_STEP = ("loss", "threshold", "grad_scale")
"""Numbers of the newest step, named as in `StepRecord`."""


class RunMetrics:
    """The newest step and the counts of the run, as named numbers for a logger.

    The counts come from the engines' states at the start of a run and after a rollback, when these
    are on the host. Each record then adds to the counts, without a further sync.

    Args:
        per_tensor: whether the policy clips each tensor by itself. Records do not show such
            clipping, so there is no metric `heal/clips`.
    """

    def __init__(self, *, per_tensor: bool) -> None:
        self._names = [*_OF_STEP, "lr_scale", "incidents", *COUNTS[per_tensor:]]
        """Names of all metrics, without the prefix `heal/`."""
        self._counts: dict[str, Counter[str]] = {}
        self._last: dict[str, StepRecord] = {}

    def set(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the counts from engine states (`Driver.engines`), and drops undone steps."""
        for name, engine in engines.items():
            state = engine["state"]
            self._counts[name] = Counter({each: int(state["tally"][each]) for each in COUNTS})
            if name in self._last and self._last[name].step > state["step"]:
                del self._last[name]

    def add(self, records: Iterable[StepRecord]) -> None:
        """Adds the records of one step."""
        for record in records:
            counts = self._counts.setdefault(record.engine, Counter())
            last = self._last.get(record.engine)
            # A step that a GradScaler skipped is not judged, and repeats the previous record.
            if record.judged and (last is None or last.step != record.step):
                counts["clips"] += record.grad_scale < 1 and not record.skip
                counts["skips"] += record.skip
                counts["lr_cuts"] += bool(record.action and record.action & Action.CUT_LR)
                counts["alarms"] += record.cause != 0
            self._last[record.engine] = record

    def total(self, count: str) -> int:
        """Sum of one of `COUNTS` over all engines."""
        return sum(counts[count] for counts in self._counts.values())

    def values(self) -> dict[str, float]:
        """Name -> value, such as `heal/skips`, or `heal/<engine>/skips` with several engines."""
        metrics: dict[str, float] = {}
        for name, record in self._last.items():
            prefix = "heal" if len(self._last) == 1 else f"heal/{name}"
            seen = {"incidents": record.incident, "loss": record.readings.loss}
            counts = {count: self._counts[name][count] for count in COUNTS}
            numbers = record._asdict() | seen | counts
            metrics |= {f"{prefix}/{each}": float(numbers[each]) for each in self._names}
        return metrics


class ChangedMetrics:
    """Metrics for the rows of a trainer's own log: only values that changed since the last row.

    Metrics of single steps are omitted: they are `LAG` steps older than the row, which has the loss
    itself. A healthy row has no metrics.
    """

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values
        self._before: dict[str, float] = {}

    def __call__(self) -> dict[str, float]:
        """Full name -> value of the changed counts and learning-rate multipliers."""
        now = {n: v for n, v in self._values().items() if n.rpartition("/")[2] not in _OF_STEP}
        initial = {name: float(name.endswith("/lr_scale")) for name in now}
        before, self._before = {**initial, **self._before}, {**self._before, **now}
        return {name: value for name, value in now.items() if value != before[name]}
