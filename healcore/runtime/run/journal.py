"""`Journal`: what the steps of a run have shown. `Ledger`: what has happened and what was tried.

Both are folds over the records of the steps, and every checkpoint holds both. A way back takes the
journal of its checkpoint, so that decisions continue from what was known at that step. It keeps the
ledger: incidents, rollbacks and skips also count in undone steps.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ConfigDict, NonNegativeInt

from healcore.core.decision import NONFINITE, Cause, names_of
from healcore.core.step_record import SKIPS, StepRecord, Why
from healcore.runtime.data import BatchId
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.trouble import RollbackRecord

_MAX_INCIDENTS = 1000
"""Max incidents in the ledger; the oldest are dropped."""
_WITH_ENVELOPES = 20
"""Newest rollbacks whose envelopes are kept: one place of the run has fewer."""
_MAX_DAMAGE = 1000
"""Max onsets of damage in the ledger; the newest are dropped."""


class BatchRange(NamedTuple):
    """Batches of one step that follow one another in an epoch: one entry for each accumulation."""

    step: int
    """The step."""
    epoch: int
    """Epoch of the batches."""
    index: int
    """Index of the first batch in its epoch."""
    count: int
    """Number of batches."""


class Alarm(NamedTuple):
    """The alarm of a step within an incident."""

    cause: int
    """`Cause` flags that open an incident."""
    engine: str
    """The first engine with such a cause."""


@dataclass
class Journal:
    """What the steps up to now have shown.

    `add` adds the steps in order.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    next_step: int = 0
    """Index of the step after the newest one."""
    unhealthy: list[int] = field(default_factory=list)
    """Steps that were skipped, were not taken, or had an alarm within an incident; also micro-steps
    directly after such a step. Ascending."""
    not_taken: int = 0
    """Number of steps in which no optimizer took a step."""
    open: bool = False
    """Whether an incident with more than skipped non-finite steps is open."""
    last_trained: NonNegativeInt | None = None
    """Index of the last step that was not skipped."""
    nonfinite_streak: NonNegativeInt = 0
    """Number of consecutive steps up to the newest without a finite step."""
    never_finite: bool = True
    """Whether no step of the run was finite."""
    has_micro_steps: bool = False
    """Whether optax.MultiSteps accumulates gradients around `protect`."""
    dropped: int = 0
    """Number of steps that a loss scale has left out."""
    loader_start: int = 0
    """First step of the current loader. Batch ids of earlier loaders have no meaning in it."""
    batches: list[BatchRange] = field(default_factory=list)
    """The batches of the last steps, oldest first."""
    last_rates: dict[str, float] = field(default_factory=dict)
    """Engine -> the program's learning rate at the newest step, where it is known."""
    rates: dict[str, float] = field(default_factory=dict)
    """Engine -> the highest learning rate in force at a trained step, where it is known."""

    def add(self, result: StepResult, opening: int = -1, kept: int = 1000) -> Alarm | None:
        """Adds one step.

        Args:
            result: the step.
            opening: `Cause` flags that open an incident. All other alarms only alert.
            kept: number of steps whose batches are kept.

        Returns:
            Its alarm within an incident, or None.
        """
        index, why = result.index, result.why
        self.next_step = index + 1
        self._add_batches(index, result.batches, kept)
        cause, engine = 0, ""
        judged = is_open = finite = is_kept = False
        for record in result.records:
            is_judged = record.judged
            judged |= is_judged
            is_open |= record.incident_open
            is_kept |= record.why == Why.STATE_KEPT
            finite |= is_judged and not (record.cause and record.cause & NONFINITE)
            self.dropped += record.why == Why.EXTERNAL
            # An alert alone (a clipped gradient spike) opens no incident.
            if record.incident_open or record.why:
                cause |= int(record.cause) & opening
                if cause and not engine:
                    engine = record.engine
        if finite:
            self.nonfinite_streak, self.never_finite = 0, False
        else:
            self.nonfinite_streak += judged or is_kept
        if result.taken:
            self.last_trained = index
        elif why == Why.NOT_DUE:
            self.has_micro_steps = True
        if judged:
            self.open = is_open
            if not cause:
                return None
        elif why != Why.STATE_KEPT:
            # Neither a micro-step nor an overflow at a loss scale ends a row of unhealthy steps:
            # the next update decides.
            if self.unhealthy and self.unhealthy[-1] == index - 1:
                self.unhealthy.append(index)
            return None
        self.unhealthy.append(index)
        self.not_taken += not result.taken
        if cause:
            return Alarm(cause, engine)
        return None

    def _add_batches(self, step: int, ids: Sequence[BatchId], kept: int) -> None:
        """Adds the batches of a step, and drops those of steps before the last `kept` ones."""
        for epoch, index in ids:
            if self.batches:
                last = self.batches[-1]
                if last[:2] == (step, epoch) and last.index + last.count == index:
                    self.batches[-1] = last._replace(count=last.count + 1)
                    continue
            self.batches.append(BatchRange(step, epoch, index, 1))
        while self.batches and self.batches[0].step <= step - kept:
            del self.batches[0]

    def batches_of(self, steps: Container[int]) -> list[BatchId]:
        """The batches of some steps, in the order of the steps. Steps of long ago have none."""
        found: list[BatchId] = []
        for step, epoch, index, count in self.batches:
            if step in steps:
                found += [BatchId(epoch, index + place) for place in range(count)]
        return found

    def batches_between(self, first: int, last: int) -> list[BatchId]:
        """The batches of the steps `first` to `last` that the current loader has read."""
        return self.batches_of(range(max(first, self.loader_start), last + 1))

    def unhealthy_between(self, first: int, end: int) -> list[int]:
        """The unhealthy steps from `first` to before `end`, ascending."""
        return [step for step in self.unhealthy if first <= step < end]

    def healthy_steps(self, first: int, end: int) -> int:
        """Number of healthy steps from `first` to before `end`.

        Unhealthy steps do not restart the count: otherwise no checkpoint would become known-good in
        a run that skips a bad batch now and then.
        """
        return end - first - len(self.unhealthy_between(first, end))

    def first_consecutive(self, index: int) -> int:
        """First of the consecutive unhealthy steps that end at a step.

        The trouble of the step has begun there.

        Args:
            index: the last of the steps.

        Returns:
            The first step, or `index + 1` if the step itself is healthy.
        """
        for step in reversed(self.unhealthy):
            if step == index:
                index -= 1
            elif step < index:
                break
        return index + 1

    def drop_before(self, step: int) -> None:
        """Drops unhealthy steps, except consecutive ones up to the newest step.

        Args:
            step: step before which no checkpoint is left, so that nothing asks for the steps.
        """
        step = min(step, self.first_consecutive(self.next_step - 1))
        self.unhealthy = self.unhealthy_between(step, self.next_step)


@dataclass
class IncidentRecord:
    """One incident, from the step of its first alarm (`onset`) to its latest alarm (`last`).

    Alarms that follow one another closely have one cause, so they are reported and answered once. A
    rollback and a restart end the incident that is open.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    number: int
    """Number of the incident, from 1 over the whole run. A rollback does not reset the count."""
    onset: int
    """Step of the first alarm."""
    last: int
    """Step of the latest alarm."""
    cause: int
    """`Cause` flags of all alarms."""
    first: dict[str, int] = field(default_factory=dict)
    """Name of a cause -> first step with this cause."""
    alarms: int = 0
    """Number of steps with an alarm."""
    skips: int = 0
    """Number of these steps that were skipped."""
    over: bool = False
    """Whether the engine has closed the incident, so that the next alarm opens another one."""
    reported_over: bool = False
    """Whether its event `over` was written."""
    number_in_engine: NonNegativeInt | None = 0
    """The engine's number of this incident, or None if the engine's count has restarted since."""
    engine: str = ""
    """Name of the optimizer with the first alarm."""

    @property
    def only_skips(self) -> bool:
        """Whether each alarm is a skipped step that was not finite, which changed no weights.

        A finite step within such an incident shows that the weights were finite there. If an order
        follows later, its trouble begins at the first of the last consecutive skips, and not at the
        incident's first alarm.
        """
        return self.skips == self.alarms and not Cause(self.cause) & ~NONFINITE

    def add(self, index: int, causes: int) -> None:
        """Adds an alarm.

        Args:
            index: index of the step.
            causes: `Cause` flags of the alarm.
        """
        self.last = index
        self.alarms += 1
        self.cause |= causes
        for name in names_of(Cause(causes)):
            self.first.setdefault(name, index)


@dataclass
class Ledger:
    """What has happened in a run and what was tried: incidents, rollbacks, skips, accepted damage.

    It outlives every way back, because budgets count what was undone too.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    incidents: list[IncidentRecord] = field(default_factory=list)
    """The newest incidents, oldest first."""
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    """All rollbacks, oldest first; see `RollbackRecord.outline`."""
    incident_count: int = 0
    """Number of incidents so far, including dropped incidents."""
    skips: int = 0
    """Number of skipped steps so far."""
    accepted: int = 0
    """Number of troubles accepted in a row, see `Outcome.ACCEPT`."""
    undone: int = 0
    """Number of the oldest rollbacks that no longer count, because a stop has ended their run."""
    spent: int = 0
    """Rollbacks that the engine had made before this run, in another framework."""
    accepted_until: int = 0
    """Step before which no comparison rolls back again."""
    damage_left: list[int] = field(default_factory=list)
    """Onsets of damage that the weights keep: it has come back after each rollback and was
    accepted, or no checkpoint could be restored. Ascending."""
    last_alarms: dict[str, int] = field(default_factory=dict)
    """Optimizer and cause, as in `actor/PLATEAU` -> last step with this cause. A cause that lasted
    until a rollback still lasts, if it comes again."""

    def add(
        self, result: StepResult, alarm: Alarm | None, *, is_open: bool
    ) -> IncidentRecord | None:
        """Counts one step.

        Args:
            result: the step.
            alarm: its alarm, see `Journal.add`.
            is_open: whether an incident of an engine is open after the step.

        Returns:
            The incident that the step belongs to, or None.
        """
        skipped = result.why in SKIPS
        self.skips += skipped
        if alarm is None:
            if result.judged and self.incidents and not is_open:
                self.incidents[-1].over = True
            return None
        harmless = skipped and not Cause(alarm.cause) & ~NONFINITE
        incident = self._current(result.index, result.records, harmless)
        incident.engine = incident.engine or alarm.engine
        incident.add(result.index, alarm.cause)
        incident.skips += skipped
        return incident

    def _current(self, index: int, records: Sequence[StepRecord], harmless: bool) -> IncidentRecord:
        """Finds or opens an alarm's incident. An incident of nothing but skips takes no other."""
        last = None
        if self.incidents:
            last = self.incidents[-1]
        number = max(record.incident for record in records)
        same = last is not None and not last.over
        if last is not None and last.only_skips:
            same = harmless and number == last.number_in_engine
        if last is None or not same:
            if last is not None:
                last.over = True
            self.incident_count += 1
            last = IncidentRecord(self.incident_count, index, index, 0, number_in_engine=number)
            self.incidents.append(last)
            del self.incidents[:-_MAX_INCIDENTS]
        last.over = False
        return last

    def end_incident(self) -> None:
        """Ends the incident that is open, at a way back: its steps are undone."""
        if self.incidents:
            self.incidents[-1].over = True
            self.incidents[-1].number_in_engine = None

    @property
    def in_force(self) -> list[RollbackRecord]:
        """The rollbacks since the last stop of the run, oldest first."""
        return self.rollbacks[self.undone :]

    def same_trouble(self, onset: int, within: int = 0) -> list[RollbackRecord]:
        """The earlier rollbacks for the trouble that begins at step `onset`, oldest first.

        The trouble is the same if its onset is at most `within` steps after the step at which the
        rollback began.

        Args:
            onset: step at which the trouble begins.
            within: number of steps by which the onset may be later.
        """
        return [each for each in self.in_force if onset <= each.step + within]

    def add_rollback(self, rollback: RollbackRecord) -> None:
        """Adds a rollback that was carried out, and drops the envelopes of old ones."""
        self.rollbacks.append(rollback)
        for each in range(len(self.rollbacks) - _WITH_ENVELOPES):
            self.rollbacks[each] = self.rollbacks[each].outline()

    def keep_damage(self, onset: int) -> None:
        """Records damage that the weights keep. No later rollback repairs it.

        Args:
            onset: step at which the damage begins.
        """
        self.damage_left = sorted({*self.damage_left, onset})[:_MAX_DAMAGE]

    def stop(self, step: int) -> None:
        """Ends the tries of a run that has stopped: the next start makes its own.

        Incidents, skips and the rollbacks themselves stay in the counts of the run.

        Args:
            step: step from which the next start trains again.
        """
        self.undone = len(self.rollbacks)
        self.accepted = self.accepted_until = 0
        self.damage_left = [onset for onset in self.damage_left if onset < step]
