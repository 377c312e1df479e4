"""When a run saves."""

from __future__ import annotations

from collections.abc import Callable

from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.driver import Driver
from healcore.runtime.ledger import Ledger
from healcore.runtime.rollback.manager import RollbackManager


class SaveSchedule:
    """The regular saves of a run, its first and its last.

    Args:
        driver: the live state.
        checkpoints: of the run.
        rollbacks: knows the content of a checkpoint.
        ledger: unhealthy steps.
        observes: the policy only observes.
        warn: writes an event, and a warning to the console log.
    """

    def __init__(
        self,
        driver: Driver,
        checkpoints: CheckpointManager,
        rollbacks: RollbackManager,
        ledger: Ledger,
        *,
        observes: bool,
        warn: Callable[[str], object],
    ) -> None:
        self._driver = driver
        self._checkpoints = checkpoints
        self._rollbacks = rollbacks
        self._ledger = ledger
        self._observes = observes
        self._warn = warn
        self._steps = 0
        """Steps since the last call of `due`; a dispatch may have several."""
        self._overdue = 0
        """Step at which a save became due that has not been taken yet; 0: none."""
        self._saved = -1
        """Step of the last checkpoint, or that the run started or resumed from."""

    def count(self, steps: int) -> None:
        """Counts steps; a negative number corrects an earlier count."""
        self._steps += steps

    def reset(self, step: int) -> None:
        """The state is that of the checkpoint of `step`, or the initial one."""
        self._saved, self._overdue, self._steps = step, 0, 0

    def due(self, step: int) -> bool:
        """Whether a save is due and possible; called once per dispatch."""
        steps, self._steps = self._steps, 0
        if self._checkpoints.due(step, steps):
            self._overdue = self._overdue or step
        return bool(self._overdue) and self.alarm_free(step) and self._driver.may_save()

    def alarm_free(self, step: int) -> bool:
        """Whether the last steps had no alarm, which may be the first of an incident.

        A save is delayed by at most one interval: a run with an alarm now and then has an incident
        open most of the time. A checkpoint from after an onset does no harm, since a rollback
        quarantines it.
        """
        unhealthy = self._ledger.unhealthy
        alarmed = bool(unhealthy) and unhealthy[-1] >= step - 2
        late = step - self._overdue >= self._checkpoints.every
        return not alarmed or late or self._observes

    def save(self, step: int, why: str) -> None:
        """Saves a checkpoint of this step."""
        self._overdue, self._saved = 0, step
        self._checkpoints.save(step, *self._rollbacks.contents(step), why)
        if self._rollbacks.journal_outdated:
            self._rollbacks.write_journal(step)

    def save_last(self, step: int) -> None:
        """Saves a checkpoint of the last step, if the last one is older."""
        if step == self._saved and not self._checkpoints.in_memory_only(step):
            return
        if self._driver.may_save():
            self.save(step, "last")
            return
        self._warn(f"the run ends within an accumulation: the last checkpoint is {self._saved}")
