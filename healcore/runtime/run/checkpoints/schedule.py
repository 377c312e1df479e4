"""`SaveSchedule`: when a regular save of a run is due.

    step    0         every     2 * every     3 * every
            |-----------|-----------|-----------|
    due                 ^           ^           ^

A save is delayed by at most one interval after an alarm. It is skipped if the saves so far took
more than their share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from healcore.runtime.run.witness.witness import MAX_SHARE

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

RECENT_ALARM_STEPS = 2
"""Steps after an alarm in which no checkpoint is saved: the alarm may begin an incident."""
_UNSAVED_INTERVALS = 3
"""Checkpoint intervals without a save after which a run warns."""
FREE_S = 10.0
"""Seconds that the regular saves of a run may take in addition to `MAX_SHARE` of its time."""


class SaveReason(StrEnum):
    """Why a checkpoint is saved. The event `save` has the value."""

    FIRST = "first"
    """The snapshot before the first step."""
    REGULAR = "regular"
    """The schedule says so."""
    ORDERED = "ordered"
    """A rule of the policy or a hook says so. If a trainer saves, healcore calls the trainer."""
    REQUESTED = "requested"
    """The program has called `Healer.save`."""
    ROLLBACK = "rollback"
    """The target of a rollback is not on disk as it was restored."""
    LAST = "last"
    """The run ends."""
    EMERGENCY = "emergency"
    """An exception ends the run."""


class SaveSchedule:
    """When a regular save is due: once per interval, unless alarms or slow saves delay the save.

    Args:
        run: the parts of the run.
        every: steps between two saves, or None to save once per probation, and less often if saves
            are slow.
    """

    def __init__(self, run: Run, every: int | None) -> None:
        self.run = run
        self.every = every or run.policy.rollback.probation
        """Steps between two saves."""
        self.last_saved: int | None = None
        """Step of the last checkpoint or of the start, or None before the start."""
        self.last_regular: int | None = None
        """Step of the last regular save that was made or skipped, of the start or of the last
        rollback; or None before the start. Another save changes neither when weights are saved
        regularly nor with which weights later weights are compared."""
        self.saved_in_body = False
        """Whether the program has asked for the last checkpoint, within the body of its loop. The
        rest of the body, and a `break`, may have changed what a restart has to know."""
        self.after_change = False
        """Whether no checkpoint has the structure that the program has given to its model."""
        self._limits_time = every is None
        self._next_warning = _UNSAVED_INTERVALS * self.every
        """Steps without a save after which a warning follows."""
        self._saving_s = 0.0
        """Seconds that the regular saves of this process have taken."""
        self._began = time.monotonic()

    def due(self) -> bool:
        """Whether a regular save is due, and possible. Called once per dispatch.

        Warns if nothing was saved for three intervals, then at twice the distance each time: a
        restart would lose all steps since the last save.

        Returns:
            True if the run should save now. With several ranks the answer is the same on all of
            them, and the method may be collective.
        """
        if self.run.progress.step - (self.last_saved or 0) >= self._next_warning:
            self._next_warning *= 2
            self.run.log.problem(
                self.run.progress.step,
                f"no checkpoint since step {self.last_saved or 0}, where a restart begins: alarms, "
                "gradients that no optimizer has stepped with, or saves of more than 1 % of the "
                "time (Checkpoints(every=N) saves all the same) delay it",
            )
        wanted = self._missed_saves >= 1 or self.after_change
        if not wanted or self.delayed or not self.may_save:
            return False
        if self._limits_time and self.saves_are_slow:
            self.last_regular = self.run.progress.step  # the next one is due in the next interval
            return False
        return True

    @property
    def saves_are_slow(self) -> bool:
        """Whether the saves of any rank have taken more than their share of the run's time.

        Without a limit, saves that each take as long as the steps between two saves double the time
        of a run (124 M parameters on an H100: 66 ms per step, and 37 ms without saves). The clock
        decides nothing but this: a save that is skipped changes no weight. The ranks agree, because
        all of them have to take part in a save. Collective.
        """
        allowed = FREE_S + MAX_SHARE * (time.monotonic() - self._began)
        return any(self.run.ranks.gather(self._saving_s > allowed))

    @property
    def may_save(self) -> bool:
        """Whether the driver allows a save now, see `Driver.may_save`.

        Within an accumulation a part of the gradients is summed up already. A restart from a
        checkpoint would lose this part, because gradients are not saved.
        """
        return self.run.driver.may_save(self.every)

    @property
    def _missed_saves(self) -> int:
        """Number of regular saves that were due since the last one."""
        interval = self.run.progress.step // self.every
        if self.last_regular is None:
            return interval + 1  # the first save, at the start, is due too
        return interval - self.last_regular // self.every

    @property
    def delayed(self) -> bool:
        """Whether a recent alarm, which may begin an incident, delays a regular save.

        The delay is at most one interval, because a run with occasional alarms has an incident open
        most of the time. A checkpoint after an onset does no harm: a rollback abandons it. Under a
        policy that only observes, nothing is delayed.
        """
        return self.recent_alarm and self._missed_saves <= 1 and not self.run.policy.observes

    @property
    def recent_alarm(self) -> bool:
        """Whether one of the last `RECENT_ALARM_STEPS` steps had an alarm.

        Weights saved so soon after an alarm may hold the damage of an incident that is only
        beginning, so `delayed` puts off a regular save.
        """
        first = self.run.progress.step - RECENT_ALARM_STEPS
        return any(step >= first for step in self.run.record.journal.unhealthy[-1:])

    @contextmanager
    def saving(self, why: SaveReason) -> Iterator[None]:
        """A context for the save of the current step.

        The time of regular and last saves is limited. A save after a rollback has to be done
        however long it takes.
        """
        began = time.monotonic()
        self.last_saved = self.run.progress.step
        self.saved_in_body = why is SaveReason.REQUESTED
        if why is SaveReason.REGULAR:
            self.last_regular = self.run.progress.step
        self.after_change = False
        self._next_warning = _UNSAVED_INTERVALS * self.every
        yield
        if why in (SaveReason.REGULAR, SaveReason.LAST):
            self._saving_s += time.monotonic() - began
