"""What the loop watches of the program: steps that are not taken, and changes of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from healcore.console import first_of, passes_power_of_ten
from healcore.runtime.driver import WEIGHTS

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MAX_UNSEEN_STEPS = 20
"""Steps without a call of the Healer after which a line says what follows from that."""
MAX_WITHOUT_STEP = 100
"""Batches without a step after which a run may end. Fewer may be a gradient accumulation."""
MAX_ITERATIONS = 1000
"""Iterations of a loop without a step after which a run that trains ends with an error. No gradient
accumulation is as long."""


def warn_of_unseen_steps(run: Run, waiting: int) -> None:
    """Warns a loop that reads batches and takes no step of an optimizer in the state.

    Such a program may train an optimizer that is not in the state. Then its weights change before
    the first step, or it reads more batches than any gradient accumulation. Or its steps have no
    gradients.

    Args:
        run: the parts of the run.
        waiting: number of batches since the last step: `MAX_WITHOUT_STEP` or `MAX_ITERATIONS`.
    """
    reason = run.driver.no_step_reason()
    if reason:
        run.loop.warn(reason)
        return
    step, loader = run.progress.step, run.step_batches.last_read
    is_wrong = waiting == MAX_ITERATIONS
    if not is_wrong and not step and run.driver.state_is_in_place:
        is_wrong = run.driver.settings()[WEIGHTS] != run.record.settings.get(WEIGHTS)
    if is_wrong and (loader is None or loader.trains or not step):
        run.loop.warn(
            f"{waiting} batches without a step that the Healer sees: the state needs the optimizer "
            "whose step() the loop calls"
        )


class StructureChanges:
    """Finds out after each step whether the program has added or removed parameters.

    Earlier checkpoints and earlier weights in memory do not fit such a model. Without a record of
    the change, a rollback would try to restore them, and a restart would reject a model of another
    structure. So a checkpoint follows soon, and comparisons begin again.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._count = 0
        """Number of changes in this process."""

    def note(self) -> None:
        """Records a change of the structure since the last call, and makes a checkpoint due.

        Called after each step. Without the checkpoint, a rollback would have nothing that fits the
        changed model. A program may change its structure often, as in progressive growing, so lines
        in the log become rarer with the number of changes.
        """
        run = self._run
        changes = run.driver.structure_changes()
        if not changes:
            return
        step, epoch = run.progress.step, run.loaders.place.epoch
        run.record.add_change(max(step - 1, 0), epoch)
        run.loaders.epoch_loop.changed_in = epoch
        run.witness.on_structure_change()
        run.schedule.after_change = True
        self._count += 1
        if passes_power_of_ten(self._count - 1, self._count):
            run.log.note(
                step,
                f"the program has changed the structure of its model: {first_of(changes)}. "
                "A checkpoint follows, because earlier ones do not fit it",
            )
