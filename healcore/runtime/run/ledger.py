"""`Ledger`: the unhealthy steps, incidents and rollbacks of a run..

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict

from healcore.core.step_record import StepRecord
from healcore.core.verdict import NONFINITE, Cause, names
from healcore.runtime.run.orders import HealthyRange, RollbackRecord

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
