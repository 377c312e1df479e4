"""When a run saves, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable

from healcore.runtime.recovery.host_state import ITEM
from healcore.runtime.recovery.recovering import Recovery


class Saver:
    """The checkpoints that a run takes of itself.

    Args:
        recovery: of the run.
        warn: takes an event and a line.
    """

    def __init__(self, recovery: Recovery, warn: Callable[[str], object]) -> None:
        self._recovery = recovery
        self._driver = recovery.driver
        self._keeper = recovery.keeper
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
        if self._keeper.due(step, taken):
            self._overdue = self._overdue or step
        return bool(self._overdue) and self.undisturbed(step) and self._driver.may_save()

    def undisturbed(self, step: int) -> bool:
        """Whether no alarm has just come, which may be the first of many.

        A save does not wait for ever: in a run with an alarm now and then an incident is open most
        of the time. What was saved after an onset is set aside when the run goes back; nothing is
        lost by it.
        """
        ledger = self._recovery.ledger
        alarmed = bool(ledger.unhealthy) and ledger.unhealthy[-1] >= step - 2
        late = step - self._overdue >= self._keeper.every
        return not alarmed or late or self._recovery.policy.observes

    def save(self, step: int, why: str) -> None:
        """A checkpoint of this step."""
        recovery = self._recovery
        self._overdue, self._saved = 0, step
        healing = {
            "schema": 1,
            "lineage": recovery.journal.page.lineage,
            "step": step,
            "engines": self._driver.healing(),
            "ledger": recovery.ledger.to_dict(),
        }
        state = {**self._driver.items(), ITEM: recovery.host}
        self._keeper.save(step, state, healing, why)
        if recovery.unwritten:
            recovery.write_journal(step)

    def save_last(self, step: int) -> None:
        """A checkpoint of where the run ends, if the last one is older."""
        if step == self._saved and not self._keeper.in_memory_only(step):
            return
        if self._driver.may_save():
            self.save(step, "last")
            return
        self._warn(f"the run ends within an accumulation: the last checkpoint is {self._saved}")
