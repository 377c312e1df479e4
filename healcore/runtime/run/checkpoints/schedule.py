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
from typing import TYPE_CHECKING

from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.compare.credit import MAX_SHARE
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.ranks import Ranks

if TYPE_CHECKING:
    from healcore.runtime.run.progress import RunProgress
    from healcore.runtime.run.run_record import RunRecord

RECENT_ALARM_STEPS = 2
"""Steps after an alarm in which no checkpoint is saved: the alarm may begin an incident."""
_UNSAVED_INTERVALS = 3
"""Checkpoint intervals without a save after which a run warns."""
FREE_S = 10.0
"""Seconds that the regular saves of a run may take in addition to `MAX_SHARE` of its time."""


class SaveSchedule:
    """When a regular save is due: once per interval, unless alarms or slow saves delay the save.

    Args:
        every: steps between two saves, or None to save once per probation, and less often if saves
            are slow.
        policy: the policy. Under a policy that only observes, alarms delay nothing.
        driver: knows whether an accumulation of gradients prevents a save.
        ranks: the ranks, which agree that saves are slow.
        log: the log, for a warning if nothing was saved for long.
        record: has the steps with an alarm.
        progress: the number of steps.
    """

    def __init__(
        self,
        every: int | None,
        *,
        policy: HostPolicy,
        driver: Driver,
        ranks: Ranks,
        log: RunLog,
        record: RunRecord,
        progress: RunProgress,
    ) -> None:
        self.every = every or policy.rollback.probation
        """Steps between two saves."""
        self.last_saved: int | None = None
        """Step of the last checkpoint or of the start, or None before the start."""
        self.last_regular: int | None = None
        """Step of the last regular save, of the start or of the last rollback; or None before the
        start. Another save changes neither when weights are saved regularly nor with which weights
        later weights are compared."""
        self.saved_in_body = False
        """Whether the program has asked for the last checkpoint, within the body of its loop. The
        rest of the body, and a `break`, may have changed what a restart has to know."""
        self.after_change = False
        """Whether no checkpoint has the structure that the program has given to its model."""
        self._policy = policy
        self._driver = driver
        self._log = log
        self._record = record
        self._progress = progress
        self._time = _SavingTime(ranks)
        self._limits_time = every is None
        self._next_warning = _UNSAVED_INTERVALS * self.every
        """Steps without a save after which a warning follows."""
        self._slow_saves_reported = False

    def due(self) -> bool:
        """Whether a regular save is due, and possible. Called once per dispatch.

        Warns if nothing was saved for three intervals, then at twice the distance each time: a
        restart would lose all steps since the last save.

        Returns:
            True if the run should save now. With several ranks the answer is the same on all of
            them, and the method may be collective.
        """
        if self._progress.step - (self.last_saved or 0) >= self._next_warning:
            self._next_warning *= 2
            self._warn()
        wanted = self._missed_saves >= 1 or self.after_change
        if not wanted or self.delayed or not self.may_save:
            return False
        return not (self._limits_time and self.saves_are_slow)

    @property
    def saves_are_slow(self) -> bool:
        """Whether the saves of any rank have taken too long. Collective once per interval."""
        return self._time.exceeds_limit(self._progress.step // self.every)

    def _warn(self) -> None:
        """Warns that nothing was saved for long, and why. Slow saves are a reason only once."""
        slow = self._time.exceeded
        if slow and self._slow_saves_reported:
            return
        if slow:
            self._slow_saves_reported = True
        if not self.may_save:
            why = "an optimizer has gradients that it has not stepped with: step or zero_grad()"
        elif slow:
            why = f"saves have taken {self._time.total_s:.0f} s, more than 1 % of the time; "
            why += "Checkpoints(every=N) saves every N steps"
        else:
            why = "alarms delay the save"
        saved = self.last_saved
        line = f"no checkpoint since step {saved} ({why}); a restart begins at step {saved}"
        if saved is None:
            line = f"no checkpoint yet ({why}); a restart begins at the first step"
        self._log.problem(self._progress.step, line)

    @property
    def may_save(self) -> bool:
        """Whether the driver allows a save now, see `Driver.may_save`.

        Within an accumulation a part of the gradients is summed up already. A restart from a
        checkpoint would lose this part, because gradients are not saved.
        """
        return self._driver.may_save(self.every)

    @property
    def _missed_saves(self) -> int:
        """Number of regular saves that were due since the last one."""
        interval = self._progress.step // self.every
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
        return self.recent_alarm and self._missed_saves <= 1 and not self._policy.observes

    @property
    def recent_alarm(self) -> bool:
        """Whether one of the last `RECENT_ALARM_STEPS` steps had an alarm.

        Weights saved so soon after an alarm may hold the damage of an incident that is only
        beginning, so `delayed` puts off a regular save.
        """
        first = self._progress.step - RECENT_ALARM_STEPS
        return any(step >= first for step in self._record.journal.unhealthy[-1:])

    @contextmanager
    def saving(
        self, *, regular: bool, in_body: bool = False, counts: bool = True
    ) -> Iterator[None]:
        """A context for the save of the current step.

        Args:
            regular: whether the schedule has asked for the save.
            in_body: whether the program has asked for the save.
            counts: whether the time of the save is limited. A save after a rollback has to be done
                however long it takes.
        """
        began = time.monotonic()
        self.last_saved = self._progress.step
        self.saved_in_body = in_body
        if regular:
            self.last_regular = self._progress.step
        self.after_change = False
        self._next_warning = _UNSAVED_INTERVALS * self.every
        yield
        if counts:
            self._time.total_s += time.monotonic() - began


class _SavingTime:
    """The time that the regular saves of a run take, and its limit, a share of the run's time.

    Without this limit, saves that each take as long as the steps between two saves double the time
    of a run (124 M parameters on an H100: 66 ms per step, and 37 ms without saves).
    """

    def __init__(self, ranks: Ranks) -> None:
        self.total_s = 0.0
        """Seconds that the regular saves of this process have taken."""
        self.exceeded = False
        """Whether the limit was exceeded on any rank at the last check."""
        self._ranks = ranks
        self._began = time.monotonic()
        self._checked: int | None = None
        """Checkpoint interval of the last check, or None before the first check."""

    def exceeds_limit(self, interval: int) -> bool:
        """Whether the saves of a rank have taken too long. Collective once per interval.

        The clock decides nothing but this: a save that is skipped changes no weight. The ranks
        agree on the answer, because all of them have to take part in a save.

        Args:
            interval: number of the checkpoint interval.
        """
        if interval != self._checked:
            allowed = FREE_S + MAX_SHARE * (time.monotonic() - self._began)
            self.exceeded = any(self._ranks.gather(self.total_s > allowed))
            self._checked = interval
        return self.exceeded
