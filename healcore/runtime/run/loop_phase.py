"""`LoopPhase`: what the loop of a run waits for, which decides what an early end may save."""

from __future__ import annotations

from enum import Enum


class LoopPhase(Enum):
    """What the loop of a run waits for.

    The phase decides what an early end may save. An exception in `BEFORE_STEP` leaves the state of
    the last step, unless it interrupts `optimizer.step()` itself. In `AFTER_STEP` of a trainer, and
    in `EPOCH_END`, the code that belongs to a step is not complete, so nothing is saved.

        phase          event                                                   next phase
        ------------   -----------------------------------------------------   ------------
        BEFORE_STEP    the start finds that an earlier process has completed   COMPLETED
                       the run
        BEFORE_STEP    a step is counted (`queue_dispatch`)                    AFTER_STEP
        AFTER_STEP     the work between two steps begins                       BEFORE_STEP
        BEFORE_STEP    a trainer has ended an epoch, and still evaluates,      EPOCH_END
                       logs or saves (`mark_step_unfinished`)
        EPOCH_END      a step is counted                                       AFTER_STEP
        EPOCH_END      the work between two steps begins                       BEFORE_STEP
        BEFORE_STEP    the start resumes from a save in the body of a loop     AFTER_STEP
        COMPLETED      a step is taken: AlreadyCompleted is raised             COMPLETED

    Any other event leaves the phase as it is.
    """

    BEFORE_STEP = "before_step"
    """All counted steps are dealt with: the next step may begin."""
    AFTER_STEP = "after_step"
    """A step was counted, and the work between two steps has not begun. The rest of the body of the
    loop runs, which may change the state. A trainer evaluates, logs or saves here."""
    EPOCH_END = "epoch_end"
    """The last step of an epoch is dealt with, and the trainer's own code after it runs."""
    COMPLETED = "completed"
    """An earlier process has completed the run. Loops yield nothing, and no step is permitted."""
