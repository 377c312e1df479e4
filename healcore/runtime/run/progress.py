"""`RunProgress`: how far the run has come, and where the program is in its loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from healcore.core.errors import HealcoreError
from healcore.runtime.data.sources import Sources


class LoopPhase(Enum):
    """What the loop of a run waits for.

        BEFORE_STEP --count--> AFTER_STEP <--begin, end--> EVALUATION
             ^  |                  |                          |
             |  `--> EPOCH_END     +-------- end_step --------+--> BEFORE_STEP

    The phase decides what an early end may save. An exception in `BEFORE_STEP` leaves the state of
    the last step, unless it interrupts `optimizer.step()` itself. In `AFTER_STEP` of a trainer, in
    `EVALUATION` and in `EPOCH_END`, the code that belongs to a step is not complete, so nothing is
    saved.
    """

    BEFORE_STEP = "before_step"
    """All counted steps are dealt with: the next step may begin."""
    AFTER_STEP = "after_step"
    """A step was counted, and the work between two steps has not begun. The rest of the body of the
    loop runs, which may change the state. A trainer evaluates, logs or saves here."""
    EVALUATION = "evaluation"
    """The same, and the body has begun to read a loader for an evaluation. A restart would not
    repeat the rest of it."""
    EPOCH_END = "epoch_end"
    """The last step of an epoch is dealt with, and the trainer's own code after it runs."""
    COMPLETED = "completed"
    """An earlier process has completed the run. Loops yield nothing, and no step is permitted."""


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
    has_resumed: bool = False
    """Whether this process continues at an earlier process's checkpoint."""
    had_completed: bool = False
    """Whether the run in the store had completed, and this process has its last state."""
    reading_error: HealcoreError | None = None
    """Error of the program that the reading of a step has shown, such as a step from
    an older state in JAX, or None. Nothing is saved after it."""

    phase: LoopPhase = LoopPhase.BEFORE_STEP
    """What the loop waits for."""
    was_used: bool = False
    """Whether the program has called `batches`, `after_step` or `update` in this process. A loop
    that takes steps without them ends with an error, because nothing could be saved or rolled back
    between its steps."""
    reached_end: bool = False
    """Whether any loop over `epochs`, `steps` or `scan`, or with `after_step(last=True)`, has come
    to its end in this process. It stays True if the program begins another loop."""
    in_body: bool = False
    """Whether the body of a loop of the program runs, or was left before its end. Loops may be
    nested; it is False again after the body of the outermost loop."""
    yielded_step: int | None = None
    """Index of the step that a loop over `steps` has yielded and whose body runs, or None outside
    of such a body."""
    body_continues: bool = False
    """Whether the body has continued after its step was counted, with a save or an evaluation. The
    rest of the body may draw random numbers."""
    step_is_epoch: bool = False
    """Whether each epoch of a loop over `epochs` is one step without `batches`."""
    searches_batch_size: bool = False
    """Whether a trainer still searches its batch size: if memory runs out, it begins again with a
    smaller batch. The run then ends without a trace: it has taken no step."""
    at_rest: bool = False
    """Whether the outermost loop has ended or was left, and its state was saved. What the program
    does until a loop takes its next step does not belong to the run."""
    own_count_obstacle: str = ""
    """Reason why a loop that counts its steps itself cannot continue, because a checkpoint has
    replaced its snapshot, or an empty string."""

    # -- steps ----------------------------------------------------------------------------------

    def resume(self, step: int, *, completed: bool) -> None:
        """Continues at an earlier process's checkpoint.

        Args:
            step: step of the checkpoint.
            completed: whether the run had ended with this checkpoint.
        """
        self.has_resumed = True
        self.had_completed = completed
        self.step = step

    def count(self, steps: int) -> None:
        """Counts steps that the program has just taken, so an evaluation before them is over.

        Args:
            steps: number of steps of the dispatch.
        """
        self.step += steps
        self.steps_taken += steps
        self.phase = LoopPhase.AFTER_STEP
        self.at_rest = False

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed a run and taken no step since.

        An empty loop is normal then: the run may have been complete, and nothing is left to train.
        Without a resume, a loop that takes no step is an error of the program.
        """
        return self.has_resumed and not self.steps_taken

    # -- the phase ------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """The body of the training loop begins an evaluation over a loader."""
        self.body_continues = True
        if self.phase is LoopPhase.AFTER_STEP:
            self.phase = LoopPhase.EVALUATION

    def end_evaluation(self) -> None:
        """The evaluation has read its last batch."""
        if self.in_evaluation:
            self.phase = LoopPhase.AFTER_STEP

    def end_step(self) -> None:
        """The body of the loop has ended, and what it has changed is kept: the step is over.

        An iteration may end without a step. Then a body that continues keeps its mark.
        """
        if self.is_after_step:
            self.body_continues = False
        if not self.is_complete:
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
    def in_evaluation(self) -> bool:
        """Whether an evaluation after a counted step has not read its last batch."""
        return self.phase is LoopPhase.EVALUATION

    @property
    def is_after_step(self) -> bool:
        """Whether the work between two steps is due for a counted step, as a save has to record."""
        return self.phase in (LoopPhase.AFTER_STEP, LoopPhase.EVALUATION)

    @property
    def has_unfinished_work(self) -> bool:
        """Whether an evaluation in the body of the loop, or the work of a trainer, is incomplete.

        An exception then leaves the work of the step incomplete, so nothing is saved. A trainer has
        stepped, and still has to evaluate, log or save after the step. In a loop of the program
        that does not evaluate, the state after a step is saved.
        """
        if self.phase is LoopPhase.AFTER_STEP:
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
