"""`RunProgress`: how far the run has come, and where the program is in its loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from healcore.core.errors import HealcoreError
from healcore.runtime.data.sources import Sources


class LoopPhase(Enum):
    """What the loop of a run waits for.

        BEFORE_STEP, AT_REST --count--> AFTER_STEP --> REST_OF_BODY <--> EVALUATION
             ^                              |               |                |
             `----------------------------- end_step -------+----------------`

    The phase decides what an early end may save. An exception in `BEFORE_STEP` leaves the state of
    the last step, unless it interrupts `optimizer.step()` itself. After the step of a trainer, in
    `EVALUATION` and in `EPOCH_END`, the code that belongs to a step is not complete, so nothing is
    saved.
    """

    BEFORE_STEP = "before_step"
    """All counted steps are dealt with: the next step may begin."""
    AFTER_STEP = "after_step"
    """A step was counted, and the work between two steps has not begun."""
    REST_OF_BODY = "rest_of_body"
    """The same, and the body has continued after its step was counted, with a save or an
    evaluation. The rest of the body may draw random numbers."""
    EVALUATION = "evaluation"
    """The same, and the body reads a loader for an evaluation. A restart would not repeat the rest
    of it."""
    EPOCH_END = "epoch_end"
    """The last step of an epoch is dealt with, and the trainer's own code after it runs."""
    AT_REST = "at_rest"
    """The outermost loop has ended or was left, and its state was saved. What the program does
    until a loop takes its next step does not belong to the run."""
    COMPLETED = "completed"
    """An earlier process has completed the run. Loops yield nothing, and no step is permitted."""


COUNTED = (LoopPhase.AFTER_STEP, LoopPhase.REST_OF_BODY, LoopPhase.EVALUATION)
"""The phases in which the work between two steps is due for a counted step."""


class Start(Enum):
    """What this process has begun with."""

    NEW = "new"
    """The first snapshot of a run."""
    RESUMED = "resumed"
    """A checkpoint of an earlier process."""
    COMPLETE = "complete"
    """The last state of a run that an earlier process had completed."""


@dataclass
class RunProgress:
    r"""The number of steps of a run, what this process has done of them, and the phase of its loop.

        earlier process      this process
        |------------------->|---------------->
        0                    resume            step
                              \_ steps_taken _/

    `step` also changes where a dispatch turns out to have had another number of steps than its
    driver had announced (`DispatchQueue`).
    """

    loaders: Sources = field(default_factory=Sources)
    """The loaders of the program."""
    has_trainer: bool = False
    """Whether a trainer owns the loop, so that an early end is not a `break`."""
    step: int = 0
    """Steps done, which is the index of the next step. A rollback decreases the number."""
    steps_taken: int = 0
    """Steps of this process, including steps that a rollback has undone."""
    start: Start = Start.NEW
    """What this process has begun with."""
    reading_error: HealcoreError | None = None
    """Error of the program that the reading of a step has shown, such as a step from
    an older state in JAX, or None. Nothing is saved after it."""

    phase: LoopPhase = LoopPhase.BEFORE_STEP
    """What the loop waits for."""
    reached_end: bool = False
    """Whether any loop over `epochs`, `steps` or `scan`, or with `after_step(last=True)`, has come
    to its end in this process. It stays True if the program begins another loop."""
    in_body: bool = False
    """Whether the body of a loop of the program runs, or was left before its end. Loops may be
    nested; it is False again after the body of the outermost loop."""
    yielded_step: int | None = None
    """Index of the step that a loop over `steps` has yielded and whose body runs, or None outside
    of such a body."""
    step_is_epoch: bool = False
    """Whether each epoch of a loop over `epochs` is one step without `batches`."""

    # -- steps ----------------------------------------------------------------------------------

    def resume(self, step: int, *, completed: bool) -> None:
        """Continues at an earlier process's checkpoint.

        Args:
            step: step of the checkpoint.
            completed: whether the run had ended with this checkpoint.
        """
        if completed:
            self.start = Start.COMPLETE
        else:
            self.start = Start.RESUMED
        self.step = step

    def count(self, steps: int) -> None:
        """Counts steps that the program has just taken, so an evaluation before them is over.

        Args:
            steps: number of steps of the dispatch.
        """
        self.step += steps
        self.steps_taken += steps
        self.phase = LoopPhase.AFTER_STEP

    @property
    def had_completed(self) -> bool:
        """Whether the run in the store had completed, and this process has its last state."""
        return self.start is Start.COMPLETE

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed a run and taken no step since.

        An empty loop is normal then: the run may have been complete, and nothing is left to train.
        Without a resume, a loop that takes no step is an error of the program.
        """
        return self.start is not Start.NEW and not self.steps_taken

    # -- the phase ------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The body of the loop has ended, and what it has changed is kept: the step is over."""
        if self.phase in COUNTED or self.phase is LoopPhase.EPOCH_END:
            self.phase = LoopPhase.BEFORE_STEP

    def mark_step_unfinished(self) -> None:
        """A trainer has ended an epoch, and still has to evaluate, log or save."""
        if self.phase is LoopPhase.BEFORE_STEP:
            self.phase = LoopPhase.EPOCH_END

    @property
    def is_complete(self) -> bool:
        """Whether an earlier process has completed the run, so that this one trains nothing."""
        return self.phase is LoopPhase.COMPLETED

    @property
    def is_after_step(self) -> bool:
        """Whether the work between two steps is due for a counted step, as a save has to record."""
        return self.phase in COUNTED

    @property
    def has_unfinished_work(self) -> bool:
        """Whether an evaluation in the body of the loop, or the work of a trainer, is incomplete.

        An exception then leaves the work of the step incomplete, so nothing is saved. A trainer has
        stepped, and still has to evaluate, log or save after the step. In a loop of the program
        that does not evaluate, the state after a step is saved.
        """
        if self.phase in (LoopPhase.AFTER_STEP, LoopPhase.REST_OF_BODY):
            return self.has_trainer
        return self.phase in (LoopPhase.EVALUATION, LoopPhase.EPOCH_END)

    # -- the body of a loop ---------------------------------------------------------------------

    @property
    def has_taken_yielded_step(self) -> bool:
        """Whether the body of a loop over `steps` has taken its step. What follows evaluates."""
        return self.yielded_step is not None and self.step > self.yielded_step

    @property
    def left_early(self) -> bool:
        """Whether the program has left its loop in the body, before the last batch or step.

        A `break` after the last batch of a training loader is not early: nothing was left to read.
        """
        loader = self.loaders.last_trained
        if loader is not None and loader.in_loop and loader.at_end:
            return False
        return self.in_body

    @property
    def break_place(self) -> str:
        """Place at which a `break` has left the loop before its last epoch ended, or ""."""
        loader = self.loaders.last_trained
        if self.has_trainer or loader is None or not loader.in_loop:
            return ""
        return loader.break_place
