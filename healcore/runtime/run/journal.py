"""`Journal`: what the steps of a run have shown, as folds over their records.

Every checkpoint holds the journal, so decisions continue after a way back from what was known at
that step. Incidents, rollbacks and skips also count in undone steps; they are in the `Ledger`.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import ConfigDict, NonNegativeInt

from healcore.core.decision import NONFINITE
from healcore.core.step_record import StepRecord, Why
from healcore.runtime.data import BatchId
from healcore.runtime.run.dispatch_queue import StepResult


class BatchRange(NamedTuple):
    """The batches of consecutive steps, as long as each step has read the next batches of an epoch.

    A checkpoint then needs one entry for a thousand steps instead of a thousand entries. A gap, a
    new epoch or another number of batches begins another entry.
    """

    first: int
    """The first step."""
    steps: int
    """Number of steps."""
    epoch: int
    """Epoch of all the batches."""
    index: int
    """Index of the first step's first batch in its epoch."""
    batches_per_step: int
    """Batches of each step."""

    def ids(self, step: int) -> list[BatchId]:
        """The batches of a step, or an empty list if the step is not in the range.

        Args:
            step: index of the step.
        """
        if not self.first <= step < self.first + self.steps:
            return []
        start = self.index + (step - self.first) * self.batches_per_step
        return [BatchId(self.epoch, start + place) for place in range(self.batches_per_step)]

    def is_followed_by(self, step: int, ids: Sequence[BatchId]) -> bool:
        """Whether a step is the next one, and has read the next batches of the epoch.

        Args:
            step: index of the step.
            ids: its batches, in the order in which it has read them.
        """
        if step != self.first + self.steps or len(ids) != self.batches_per_step:
            return False
        index = self.index + self.steps * self.batches_per_step
        for batch in ids:
            if batch != (self.epoch, index):
                return False
            index += 1
        return True


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
        self._count_nonfinite(result.records)
        cause, engine, judged, is_open = 0, "", False, False
        for record in result.records:
            judged |= record.judged
            is_open |= record.incident_open
            self.dropped += record.why == Why.EXTERNAL
            # An alert alone (a clipped gradient spike) opens no incident.
            if record.incident_open or record.why:
                cause |= int(record.cause) & opening
                if cause and not engine:
                    engine = record.engine
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
        return Alarm(cause, engine) if cause else None

    def _count_nonfinite(self, records: Sequence[StepRecord]) -> None:
        """Counts a step without a finite record, and ends the count at a finite one."""
        counts = False
        for record in records:
            if record.judged and not (record.cause and record.cause & NONFINITE):
                self.nonfinite_streak = 0
                self.never_finite = False
                return
            counts |= record.judged or record.why == Why.STATE_KEPT
        self.nonfinite_streak += counts

    def _add_batches(self, step: int, ids: Sequence[BatchId], kept: int) -> None:
        """Adds the batches of a step, and drops those of steps before the last `kept` ones."""
        if self.batches:
            last = self.batches[-1]
            if last.is_followed_by(step, ids):
                self.batches[-1] = last._replace(steps=last.steps + 1)
                ids = ()
        new: list[BatchRange] = []
        for epoch, index in ids:
            if new:
                row = new[-1]
                if epoch == row.epoch and index == row.index + row.batches_per_step:
                    new[-1] = row._replace(batches_per_step=row.batches_per_step + 1)
                    continue
            new.append(BatchRange(step, 1, epoch, index, 1))
        self.batches += new
        while self.batches and self.batches[0].first + self.batches[0].steps <= step - kept:
            del self.batches[0]

    def batches_of(self, steps: Iterable[int]) -> list[BatchId]:
        """The batches of some steps, in the order of the steps. Steps of long ago have none."""
        found: list[BatchId] = []
        for step in steps:
            for batch_range in self.batches:
                found += batch_range.ids(step)
        return found

    def batches_between(self, first: int, last: int) -> list[BatchId]:
        """The batches of the steps `first` to `last` that the current loader has read."""
        oldest = self.batches[0].first if self.batches else last
        return self.batches_of(range(max(first, self.loader_start, oldest), last + 1))

    def unhealthy_between(self, first: int, end: int) -> list[int]:
        """The unhealthy steps from `first` to before `end`, ascending."""
        steps = self.unhealthy
        return steps[bisect.bisect_left(steps, first) : bisect.bisect_left(steps, end)]

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
        at = bisect.bisect_right(self.unhealthy, index)
        while at > 0 and self.unhealthy[at - 1] == index:
            at -= 1
            index -= 1
        return index + 1

    def drop_before(self, step: int) -> None:
        """Drops unhealthy steps, except consecutive ones up to the newest step.

        Args:
            step: step before which no checkpoint is left, so that nothing asks for the steps.
        """
        step = min(step, self.first_consecutive(self.next_step - 1))
        del self.unhealthy[: bisect.bisect_left(self.unhealthy, step)]
