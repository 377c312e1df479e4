"""`StructureChanges`: what follows when the program changes the structure of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import first_of, passes_power_of_ten

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class StructureChanges:
    """Finds out after each step whether the program has added or removed parameters.

    Earlier checkpoints and earlier weights in memory do not fit such a model. Without a record of
    the change, a rollback would try to restore them, and a restart would reject a model of another
    structure. So a checkpoint follows soon, and comparisons begin again.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._count = 0  # changes in this process

    def note(self) -> None:
        """Records a change of the structure since the last call, and makes a checkpoint due.

        Called after each step. Without the checkpoint, a rollback would have nothing that fits the
        changed model. A program may change its structure often, as in progressive growing, so lines
        in the log become rarer with the number of changes.
        """
        changes = self.run.driver.structure_changes()
        if not changes:
            return
        run = self.run
        step = run.data.step
        epoch = run.loaders.place.epoch
        run.record.add_change(max(step - 1, 0), epoch)
        run.record.param_groups = run.driver.param_groups()
        run.loaders.changed_in = epoch
        run.comparisons.on_structure_change()
        run.schedule.after_change = True
        run.log.event("data", step=step, outcome=f"the model has changed: {first_of(changes)}")
        self._count += 1
        if passes_power_of_ten(self._count - 1, self._count):
            again = ""
            if self._count > 1:
                again = f" ({self._count} times so far)"
            run.log.info(
                f"step {step}: the program has changed the structure of its model{again}: "
                f"{first_of(changes)}. A checkpoint follows, because earlier ones do not fit it"
            )
