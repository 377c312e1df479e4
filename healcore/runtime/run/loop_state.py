"""`LoopState`: where the program is in its loop, which decides what an end of the run means."""

from __future__ import annotations

from enum import Enum

from healcore.runtime.data.sources import Sources
from healcore.runtime.run.progress import RunProgress


class LoopPhase(Enum):
    """What the loop of a run waits for.

    The phase decides what an early end may save. An exception in `BEFORE_STEP` leaves the state of
    the last step, unless it interrupts `optimizer.step()` itself. In `AFTER_STEP` of a trainer, and
    in `EPOCH_END`, the code that belongs to a step is not complete, so nothing is saved.
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


class LoopState:
    """Where the program is in its loop: the phase, the body, an evaluation, and how it ended.

    Everything may read the attributes. Only the methods of this class assign them, and each such
    method is named after its event. A test checks this.

        state                 event                                       new state
        -------------------   -----------------------------------------   -------------------
        BEFORE_STEP           find_completed: an earlier process has      COMPLETED
                              completed the run
        BEFORE_STEP           resume_in_body: the checkpoint was saved    AFTER_STEP
                              in the body of a loop
        BEFORE_STEP           count_step                                  AFTER_STEP
        BEFORE_STEP           mark_step_unfinished: a trainer has ended   EPOCH_END
                              an epoch
        AFTER_STEP            count_step: another step in the same body   AFTER_STEP
        AFTER_STEP            end_step: the work between two steps        BEFORE_STEP
        EPOCH_END             count_step                                  AFTER_STEP
        EPOCH_END             end_step                                    BEFORE_STEP

        outside of a body     enter_body                                  in the body
        in a body             enter_body, of a nested loop                in the body
        in a body             leave_body                                  outside, or in the body of
                                                                          the outer loop
        in a body             a `break`, which calls nothing              in the body, `left_early`
        outside of a body     yield_step                                  in the body of this step
        any body              rest: the loop has ended, its state saved   the same, and `at_rest`
        `at_rest`             count_step                                  not `at_rest`
        body of a step        end_yielded_step                            outside of a body

        no evaluation         begin_evaluation                            in an evaluation, and
                                                                          `body_continues`
        in an evaluation      end_evaluation, count_step                  no evaluation
        any body              continue_body: the program saves in it      `body_continues`
        `body_continues`      end_step in AFTER_STEP                      a body without the mark

        own count permitted   reject_own_count: a checkpoint has          own count rejected
                              replaced the program's snapshot
        own count rejected    follow_given_numbers                        own count permitted

    `mark_step_unfinished` and `end_step` leave any other phase as it is. `Loop.queue_dispatch`
    counts no step in COMPLETED, but raises. Four facts are set by one event and stay for the rest
    of the process: `was_used`, `reached_end`, `step_is_epoch` and `run_has_ended`.

    Args:
        loaders: the loaders of the program.
        progress: the number of steps.
        has_trainer: whether a trainer owns the loop, so that an early end is not a `break`.

    Attributes:
        phase: what the loop waits for.
        was_used: whether the program has called `batches`, `after_step` or `update` in this
            process. A loop that takes steps without them ends with an error, because nothing could
            be saved or rolled back between its steps.
        reached_end: whether any loop over `epochs`, `steps` or `scan`, or with
            `after_step(last=True)`, has come to its end in this process. It stays True if the
            program begins another loop.
        run_has_ended: whether the block of the Healer has ended. A generator of the program that is
            closed later changes nothing, see `loop_over_batches`.
        in_body: whether the body of a loop of the program runs, or was left before its end.
            Loops may be nested; it is False again after the body of the outermost loop.
        yielded_step: index of the step that a loop over `steps` has yielded and whose body runs, or
            None outside of such a body.
        step_is_epoch: whether each epoch of a loop over `epochs` is one step without `batches`.
        searches_batch_size: whether a trainer still searches its batch size: if memory runs out, it
            begins again with a smaller batch. The run then ends without a trace: it has taken no
            step.
        in_evaluation: whether an evaluation in the body of the training loop has begun, and has not
            read its last batch. A restart would not repeat the rest of it.
        body_continues: whether the body has continued after its step was counted, with a save or an
            evaluation. The rest of the body may draw random numbers.
        at_rest: whether the outermost loop has ended or was left, and its state was saved. What the
            program does until a loop takes its next step does not belong to the run.
        own_count_obstacle: reason why a loop that counts its steps itself cannot continue, because
            a checkpoint has replaced its snapshot, or an empty string.
    """

    def __init__(self, loaders: Sources, progress: RunProgress, *, has_trainer: bool) -> None:
        self._loaders = loaders
        self._progress = progress
        self._has_trainer = has_trainer
        self.phase = LoopPhase.BEFORE_STEP
        self.was_used = False
        self.reached_end = False
        self.run_has_ended = False
        self.in_body = False
        self.yielded_step: int | None = None
        self.step_is_epoch = False
        self.searches_batch_size = False
        self.in_evaluation = False
        self.body_continues = False
        self.at_rest = False
        self.own_count_obstacle = ""

    # -- the phase ------------------------------------------------------------------------------

    def find_completed(self) -> None:
        """The start finds that an earlier process has completed the run."""
        self.phase = LoopPhase.COMPLETED

    def resume_in_body(self) -> None:
        """The start resumes from a save in the body: the loop begins with the work after a step."""
        self.phase = LoopPhase.AFTER_STEP

    def count_step(self) -> None:
        """The program has taken a step, so an evaluation before the step is over."""
        self.phase = LoopPhase.AFTER_STEP
        self.in_evaluation = False
        self.at_rest = False

    def end_step(self) -> None:
        """The body of the loop has ended, and what it has changed is kept: the step is over.

        An iteration may end without a step. Then a body that continues keeps its mark.
        """
        if self.phase is LoopPhase.AFTER_STEP:
            self.body_continues = False
        if self.phase is not LoopPhase.COMPLETED:
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
        return self.phase is LoopPhase.AFTER_STEP

    @property
    def has_unfinished_work(self) -> bool:
        """Whether an evaluation in the body of the loop, or the work of a trainer, is incomplete.

        An exception then leaves the work of the step incomplete, so nothing is saved. A trainer has
        stepped, and still has to evaluate, log or save after the step. In a loop of the program
        that does not evaluate, the state after a step is saved.
        """
        if self.phase is LoopPhase.AFTER_STEP:
            return self._has_trainer or self.in_evaluation
        return self.phase is LoopPhase.EPOCH_END

    # -- the body of a loop ---------------------------------------------------------------------

    def note_use(self) -> None:
        """The program has called the Healer between two steps."""
        self.was_used = True

    def enter_body(self) -> bool:
        """The body of a loop begins.

        Returns:
            Whether this loop runs in the body of another loop, for `leave_body`.
        """
        was_in_body = self.in_body
        self.in_body = True
        return was_in_body

    def leave_body(self, *, in_outer_body: bool = False) -> None:
        """The body of a loop has ended.

        Args:
            in_outer_body: whether the loop runs in the body of another loop.
        """
        self.in_body = in_outer_body

    def yield_step(self, step: int) -> None:
        """A loop over `steps` yields the number of a step, and its body begins.

        Args:
            step: the index of the step.
        """
        self.yielded_step = step
        self.in_body = True

    def end_yielded_step(self) -> None:
        """The body of a loop over `steps` has ended."""
        self.in_body = False
        self.yielded_step = None

    def reach_end(self) -> None:
        """A loop has come to its end, as far as the Healer knows."""
        self.reached_end = True

    def rest(self) -> None:
        """The outermost loop has ended or was left, and its state was saved."""
        self.at_rest = True

    def end_run(self) -> None:
        """The block of the Healer has ended."""
        self.run_has_ended = True

    def count_steps_as_epochs(self) -> None:
        """Each epoch of the loop over `epochs` turns out to be one step."""
        self.step_is_epoch = True

    def set_batch_size_search(self, *, searches: bool) -> None:
        """A trainer begins or ends the search of its batch size.

        Args:
            searches: see the attribute `searches_batch_size`.
        """
        self.searches_batch_size = searches

    @property
    def has_taken_yielded_step(self) -> bool:
        """Whether the body of a loop over `steps` has taken its step. What follows evaluates."""
        yielded = self.yielded_step
        return yielded is not None and self._progress.step > yielded

    @property
    def left_early(self) -> bool:
        """Whether the program has left its loop in the body, before the last batch or step.

        A `break` after the last batch of a training loader is not early: nothing was left to read.
        """
        loader = self._loaders.last_trained
        if loader is not None and loader.in_loop and loader.at_end:
            return False
        return self.in_body

    @property
    def break_place(self) -> str:
        """Place at which a `break` has left the loop before its last epoch ended, or ""."""
        loader = self._loaders.last_trained
        if self._has_trainer or loader is None or not loader.in_loop:
            return ""
        return loader.break_place

    # -- evaluations and random numbers in the body ---------------------------------------------

    def begin_evaluation(self) -> None:
        """The body of the training loop begins an evaluation over a loader."""
        self.in_evaluation = True
        self.body_continues = True

    def end_evaluation(self) -> None:
        """The evaluation has read its last batch, or the program has left it."""
        self.in_evaluation = False

    def continue_body(self) -> None:
        """The body continues after its step was counted."""
        self.body_continues = True

    # -- errors of the program ------------------------------------------------------------------

    def reject_own_count(self, obstacle: str) -> None:
        """A checkpoint replaces the snapshot of the program, which may count its steps itself.

        Args:
            obstacle: the reason why such a loop cannot continue.
        """
        self.own_count_obstacle = obstacle

    def follow_given_numbers(self) -> None:
        """The loop takes the number of its next step or epoch from the Healer."""
        self.own_count_obstacle = ""
