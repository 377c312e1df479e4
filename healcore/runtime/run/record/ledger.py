"""`Ledger`: which steps of a run were healthy, and how the rest was treated.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict, NonNegativeInt

from healcore.core.decision import NONFINITE, Cause, names_of
from healcore.core.step_record import SKIPS, StepRecord, Why
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.monitor_state import take_fields
from healcore.runtime.run.trouble import RollbackRecord

_MAX_INCIDENTS = 1000
"""Max incidents in the ledger; the oldest are dropped."""
_WITH_ENVELOPES = 20
"""Newest rollbacks whose envelopes are kept: one place of the run has fewer."""
_MAX_UNREPAIRED = 1000
"""Max onsets of accepted damage in the ledger; the newest are dropped."""


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
    """The host's record of a run: which steps were healthy, and how the rest was treated.

    `add_step` adds the steps in order. A rollback rewinds the ledger to the restored step, but
    keeps the incidents, rollbacks and skips of the undone steps: budgets count them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    next_step: int = 0
    """Index of the step after the newest one."""
    unhealthy: list[int] = field(default_factory=list)
    """Steps that were skipped, were not taken, or had an alarm within an incident; also micro-steps
    directly after such a step. Ascending."""
    incidents: list[IncidentRecord] = field(default_factory=list)
    """The newest incidents, oldest first."""
    rollbacks: list[RollbackRecord] = field(default_factory=list)
    """All rollbacks, oldest first; see `RollbackRecord.outline`."""
    incident_count: int = 0
    """Number of incidents so far, including undone and dropped incidents."""
    skips: int = 0
    """Number of skipped steps so far, including undone steps."""
    not_taken: int = 0
    """Number of steps in which no optimizer took a step, excluding undone steps."""
    open: bool = False
    """Whether an incident with more than skipped non-finite steps is open."""
    accepted: int = 0
    """Number of troubles accepted in a row, see `Outcome.ACCEPT`."""
    undone: int = 0
    """Number of the oldest rollbacks that no longer count, because a stop has ended their run."""
    spent: int = 0
    """Rollbacks that the engine had made before this run, in another framework."""
    accepted_until: int = 0
    """Step before which no comparison rolls back again."""
    unrepaired: list[int] = field(default_factory=list)
    """Onsets of damage that has come back after each rollback and was accepted. Ascending."""
    not_restored: list[int] = field(default_factory=list)
    """Onsets of damage for which no checkpoint could be restored. Ascending."""
    last_alarms: dict[str, int] = field(default_factory=dict)
    """Optimizer and cause, as in `actor/PLATEAU` -> last step with this cause."""

    def add_step(self, result: StepResult, opening: int = -1) -> IncidentRecord | None:
        """Adds one step.

        Args:
            result: the step.
            opening: `Cause` flags that open an incident. All other alarms only alert.

        Returns:
            The incident that the step belongs to, or None.
        """
        index = result.index
        self.next_step = index + 1
        skipped = result.why in SKIPS
        self.skips += skipped
        judged = is_open = False
        cause = 0
        engine = ""  # the engine that has the first alarm
        for record in result.records:
            judged |= record.judged
            is_open |= record.incident_open
            # An alert alone (a clipped gradient spike) opens no incident.
            if record.incident_open or record.why:
                cause |= int(record.cause) & opening
                if cause and not engine:
                    engine = record.engine
        if judged:
            self.open = is_open
            if not cause:
                if self.incidents and not is_open:
                    self.incidents[-1].over = True
                return None
        elif result.why != Why.STATE_KEPT:
            # Neither a micro-step nor an overflow at a loss scale ends an incident, or a row of
            # unhealthy steps: the next update decides.
            if self.unhealthy and self.unhealthy[-1] == index - 1:
                self.unhealthy.append(index)
            return None
        self.unhealthy.append(index)
        self.not_taken += not result.taken
        if not cause:
            return None
        harmless = skipped and not Cause(cause) & ~NONFINITE
        incident = self._current(index, result.records, harmless)
        incident.engine = incident.engine or engine
        incident.add(index, cause)
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

    def accept(self, onset: int, until: int) -> None:
        """Records that damage is accepted, because it has come back after each rollback.

        Args:
            onset: step at which the damage begins. A later rollback to an earlier step does not
                repair the damage: it comes back once more, and no comparison looks for it.
            until: step before which no comparison rolls back again.
        """
        self.accepted_until = until
        self.unrepaired = sorted({*self.unrepaired, onset})[:_MAX_UNREPAIRED]

    def leave(self, onset: int) -> None:
        """Records damage for which no checkpoint could be restored, so that the run keeps it.

        Args:
            onset: step at which the damage begins.
        """
        self.not_restored = sorted({*self.not_restored, onset})[:_MAX_UNREPAIRED]

    def recover(self, onset: int) -> None:
        """Records that nothing is left of damage that the run had kept.

        Args:
            onset: step at which the damage began.
        """
        for onsets in (self.unrepaired, self.not_restored):
            if onset in onsets:
                onsets.remove(onset)

    @property
    def damage_left(self) -> tuple[int, ...]:
        """Onsets of the damage that the current weights have, ascending."""
        return tuple(sorted({*self.unrepaired, *self.not_restored}))

    def unhealthy_between(self, first: int, end: int) -> list[int]:
        """The unhealthy steps of a range, ascending.

        Args:
            first: the first step of the range.
            end: the step after the last step of the range.
        """
        steps = self.unhealthy
        return steps[bisect.bisect_left(steps, first) : bisect.bisect_left(steps, end)]

    def healthy_steps(self, first: int, end: int) -> int:
        """Number of healthy steps from `first` to before `end`.

        Unhealthy steps do not restart the count: otherwise no checkpoint would become known-good in
        a run that skips a bad batch now and then.

        Args:
            first: the first step that counts.
            end: the step after the last step that counts.
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
        at = bisect.bisect_right(self.unhealthy, index)
        while at > 0 and self.unhealthy[at - 1] == index:
            at -= 1
            index -= 1
        return index + 1

    def on_rollback(self, rollback: RollbackRecord, saved: Ledger | None) -> None:
        """Records a rollback that was carried out.

        Args:
            rollback: the rollback. The ledger continues where the run does.
            saved: the ledger in the restored checkpoint, or None if the checkpoint has no ledger.
        """
        self.rollbacks.append(rollback)
        for each in range(len(self.rollbacks) - _WITH_ENVELOPES):
            self.rollbacks[each] = self.rollbacks[each].outline()
        self.not_restored = _before(rollback.checkpoint, self.not_restored)
        self._rewind(rollback.checkpoint, saved)

    def forget(self, before: int) -> None:
        """Drops unhealthy steps before a step, except consecutive ones up to the newest step.

        Args:
            before: step before which no checkpoint is left, so that nothing asks for the steps.
        """
        before = min(before, self.first_consecutive(self.next_step - 1))
        del self.unhealthy[: bisect.bisect_left(self.unhealthy, before)]

    def continue_from(self, saved: Ledger, step: int) -> None:
        """Continues the ledger of an earlier process.

        Args:
            saved: the ledger in the checkpoint that the run resumes from.
            step: step of this checkpoint.
        """
        take_fields(self, saved)
        self._rewind(step, None)

    def stop(self, step: int) -> None:
        """Ends the tries of a run that has stopped: the next start makes its own.

        Incidents, skips and the rollbacks themselves stay in the counts of the run.

        Args:
            step: step from which the next start trains again.
        """
        self.undone = len(self.rollbacks)
        self.accepted = self.accepted_until = 0
        self.unrepaired = _before(step, self.unrepaired)
        self.not_restored = _before(step, self.not_restored)

    def _rewind(self, step: int, saved: Ledger | None) -> None:
        """Continues at a step, and closes the incident that was open."""
        self.next_step = step
        self.open = False
        del self.unhealthy[bisect.bisect_left(self.unhealthy, step) :]
        # A cause that lasted until the rollback still lasts, if it comes again.
        self.last_alarms = {name: min(last, step - 1) for name, last in self.last_alarms.items()}
        if self.incidents:
            self.incidents[-1].over = True
            self.incidents[-1].number_in_engine = None
        if saved is not None:
            self.not_taken = saved.not_taken


def _before(step: int, onsets: Sequence[int]) -> list[int]:
    """The onsets before a step."""
    return [onset for onset in onsets if onset < step]
