"""When a run saves."""

from __future__ import annotations

from collections.abc import Callable

from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.driver import Driver
from healcore.runtime.ledger import Ledger
from healcore.runtime.rollback.manager import RollbackManager


class SaveSchedule:
    """The checkpoints that a run takes of itself.

    Args:
        driver: the live state.
        checkpoints: of the run.
        rollbacks: knows what a checkpoint has to hold.
        ledger: unhealthy steps.
        observes: the policy changes nothing.
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
        self._taken = 0
        """Steps since it was last asked whether a save is due; a dispatch may have several."""
        self._overdue = 0
        """Step at which a save was due that has not been taken yet."""
        self._saved = -1
        """Step of the last checkpoint, or that the run began or went on from."""

    def stepped(self, count: int) -> None:
        """So many steps were taken; below 0: so many fewer than was thought."""
        self._taken += count

    def begins_at(self, step: int) -> None:
        """The state is that of the checkpoint of this step."""
        self._saved, self._taken, self._overdue = step, 0, 0

    def due(self, step: int) -> bool:
        """Whether to save now, and the state can be saved; once per dispatch."""
        taken, self._taken = self._taken, 0
        if self._checkpoints.due(step, taken):
            self._overdue = self._overdue or step
        return bool(self._overdue) and self.undisturbed(step) and self._driver.may_save()

    def undisturbed(self, step: int) -> bool:
        """Whether no alarm has just come, which may be the first of many.

        A save does not wait for ever: in a run with an alarm now and then an incident is open most
        of the time. What was saved after an onset is set aside when the run goes back; nothing is
        lost by it.
        """
        unhealthy = self._ledger.unhealthy
        alarmed = bool(unhealthy) and unhealthy[-1] >= step - 2
        late = step - self._overdue >= self._checkpoints.every
        return not alarmed or late or self._observes

    def save(self, step: int, why: str) -> None:
        """A checkpoint of this step."""
        self._overdue, self._saved = 0, step
        self._checkpoints.save(step, *self._rollbacks.contents(step), why)
        if self._rollbacks.unwritten:
            self._rollbacks.write_journal(step)

    def save_last(self, step: int) -> None:
        """A checkpoint of where the run ends, if the last one is older."""
        if step == self._saved and not self._checkpoints.in_memory_only(step):
            return
        if self._driver.may_save():
            self.save(step, "last")
            return
        self._warn(f"the run ends within an accumulation: the last checkpoint is {self._saved}")
