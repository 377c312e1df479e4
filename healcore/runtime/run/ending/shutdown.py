"""`Shutdown`: the end of a run, in its order.

After a kill, the next start writes the postmortem (`postmortem.write_for_killed`). Errors at the
end are logged and not raised, because they would hide the error that has ended the run.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from healcore.console import error_text, first_of
from healcore.core.decision import Cause
from healcore.core.signals import SignalError
from healcore.events.models import Ending
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.run.ending.completeness import incomplete_run_error
from healcore.runtime.run.ending.end_report import EndReport
from healcore.runtime.run.ending.exits import (
    AlreadyCompleted,
    EndRequested,
    Interrupted,
    LastStateNotSaved,
    RunStopped,
    Terminated,
)
from healcore.runtime.run.ending.judgement import report_recoveries
from healcore.runtime.run.ending.last_state import LastState, last_state
from healcore.runtime.run.memory_profile import memory_text
from healcore.runtime.store.checkpoints import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


EndedBy = Literal["block", "close", "exit"]
"""What ends the run: the end of its block, `Healer.close`, or for `healcore.start` the end of the
process."""


def ending_of(run: Run, error: BaseException | None) -> Ending:
    """Ending of a run.

    Args:
        run: the parts of the run.
        error: the exception that left the block, or None if the loop has ended by itself. The stop
            or the completion of another run is an exception like any other.

    Returns:
        The ending, for the events and the postmortem.
    """
    endings = {
        type(None): Ending.COMPLETED,
        Terminated: Ending.SIGNAL,
        KeyboardInterrupt: Ending.INTERRUPTED,
        EndRequested: Ending.REQUESTED,
    }
    if error is run.stopping.stopped:
        endings[RunStopped] = Ending.STOPPED
    if run.loop.state.is_complete:
        endings[AlreadyCompleted] = Ending.COMPLETED
    for kind, ending in endings.items():
        if isinstance(error, kind):
            return ending
    # torch's loader raises when the signal has killed its workers too.
    signal_number = run.end_requests.signal_number
    if signal_number == signal.SIGTERM and "DataLoader worker" in str(error):
        return Ending.SIGNAL
    return Ending.EXCEPTION


class Shutdown:
    """The end of one run.

    `close` calls the other methods, in this order:

        last steps     read and counted, or their orders carried out     if all ranks end here
        fault          saved before it if the policy says so, and logged
        last state     saved                                             if no step has begun
        record         marked as completed                               if the loop has ended
        reports        events, postmortem, last line
        parts          hang guard, signals, store, driver, claims, log

    Nothing raises on the way: what fails is a line of the log, and the rest is done all the same.

    Args:
        run: the parts of the run.
        error: the exception that left the block, or None.
        by: what ends the run.

    Attributes:
        error: the exception that left the block, or its replacement.
        ending: how the run ends, by `error`.
        completed: whether the loop has ended by itself.
        raised: the exception of the loop, also as the cause of a stop, or None.
        fault: the classified `raised`, or None.
        problems: errors at the end.
    """

    def __init__(self, run: Run, error: BaseException | None, *, by: EndedBy = "block") -> None:
        self.run = run
        self.error = error
        self.by = by
        self.ending = ending_of(run, error)
        self.completed = self.ending == Ending.COMPLETED
        self.raised = error
        if error is not None and self.ending == Ending.STOPPED:
            self.raised = error.__cause__
        if isinstance(error, AlreadyCompleted):
            self.raised = None  # the loop has raised no error
        self.fault: Fault | None = None
        self.problems: list[str] = []
        self.replaced: list[str] = []
        """Names of weights that the program has replaced since the last step: not to be saved."""
        self.memory_text = ""
        """Sentence about what holds the memory after an out-of-memory error, or empty."""

    def close(self) -> BaseException | None:
        """Ends the run.

        Returns:
            An exception for the block to raise instead of its own, or None.
        """
        given = self.error
        ends_after_loop = self.by == "exit" and self.run.loop.state.at_rest
        if ends_after_loop or (self.completed and self.run.loop.state.is_complete):
            self._collect(
                "the steps after the loop were not dropped", self.run.driver.take_dispatch
            )
        self.run.hang_guard.pause()
        self.run.driver.on_end()
        together = self._all_ranks_end()
        ends_by_fault = self.ending in (Ending.COMPLETED, Ending.EXCEPTION, Ending.STOPPED)
        if self.raised is not None and ends_by_fault:
            self.fault = classify(self.raised)
        ran_out = self.fault is not None and self.fault.cause is Cause.OOM
        if ran_out and self.run.loop.state.searches_batch_size:
            self._discard()
            return None
        if not self.completed or self.by == "exit":
            self._collect("the weights could not be read", self._find_replaced_weights)
        if together:
            self._read_last_steps()
        # For example SystemExit: the body has called `sys.exit` after its step.
        if self.raised is not None and not isinstance(self.raised, Exception):
            self._collect("the last step could not be counted", self.run.loop.count_last_step)
        self._save_state(together=together)
        self._report()
        self._close_parts()
        if self.error is given:
            return None
        return self.error

    def _save_state(self, *, together: bool) -> None:
        """Saves what can be saved, and completes the record of a run that has ended by itself.

        Args:
            together: whether all ranks end after this step, so that they can save together.
        """
        saver = self.run.saver
        self._collect("the damage could not be assessed", partial(report_recoveries, self.run))
        state = self._last_state()
        if self.fault is not None and isinstance(self.raised, Exception):
            action = partial(self._save_and_log_fault, self.fault, self.raised)
            self._collect("the fault could not be dealt with", action)
        if state is LastState.BEFORE_BATCHES:
            self._collect("the last state could not be saved", self._save_before_batches)
        may_save = state is LastState.COMPLETE and self._may_save_weights()
        self._save_last_state(together=together, may_save=may_save)
        if together:
            self._collect("checkpoints on probation", saver.poll)
            self._collect("the last saves", self.run.known_checkpoints.read_nonfinite)
        if self.ending == Ending.COMPLETED and not self.run.loop.state.is_complete:
            self.run.record.completed = True
            step = self.run.progress.step
            self._collect("the record of the end", partial(saver.replace_record, step))

    def _last_state(self) -> LastState:
        """The state from which a restart could resume. Called before anything is saved."""
        has_begun_step = False
        if not self.completed:
            driver = self.run.driver
            has_begun_step = bool(driver.pending_steps() or driver.is_interrupted())
        return last_state(
            completed=self.completed,
            has_begun_step=has_begun_step,
            has_unfinished_work=self.run.loop.state.has_unfinished_work,
            between_steps=self.run.step_batches.between_steps,
            ending=self.ending,
            by_stop_file=isinstance(self.error, EndRequested),
            resumes_exactly=self.run.saver.resumes_exactly,
        )

    def _may_save_weights(self) -> bool:
        """Whether the weights of a complete state are the weights of the training.

        Warns if the program has replaced them, unless `_save_and_log_fault` has said so.
        """
        if self.run.progress.reading_error is not None:
            return False
        if not self.replaced or self.run.progress.step == self.run.schedule.last_saved:
            return True
        if self.fault is None and not self.completed:
            self.run.loop.warn(f"no checkpoint was saved at the end: {self._replaced_text()}")
        return False

    def _report(self) -> None:
        """Writes the problems of the end, the postmortem and the last events and lines."""
        report = EndReport(
            self.run,
            self.error,
            raised=self.raised,
            ending=self.ending,
            fault=self.fault,
            memory_text=self.memory_text,
        )
        self._collect("the values at the exception could not be read", report.explain_nan)
        for problem in self.problems:
            self.run.loop.warn(problem)
        self.run.log.report_trackers(self.run.progress.step)
        report.write()

    def _discard(self) -> None:
        """Ends a run that has taken no step, and deletes its first snapshot.

        Called if memory ran out while a trainer searches its batch size, before the first step. The
        next run then starts again, instead of from a snapshot for another batch size.
        """
        self._collect("", self.run.saver.wait)
        self._collect("", partial(self.run.store.delete, self.run.record.first_step))
        self.run.log.info(
            "memory ran out before the first step: the trainer begins again with a smaller batch"
        )
        self._close_parts()

    def _close_parts(self) -> None:
        """Closes the parts of the run, in the order of the class docstring.

        Each part is closed even if one before it fails. It is too late to report their errors, so
        they are dropped.
        """
        self.run.loop.state.end_run()
        self._collect("", self.run.hang_guard.close)
        self._collect("", self.run.end_requests.stop_watching)
        self._collect("", self.run.store.join)
        self._collect("", self.run.driver.close)
        for claim in self.run.claims:
            self._collect("", claim.release)
        self._collect("", self.run.log.close)

    def _collect(self, what: str, action: Callable[[], object]) -> Exception | None:
        """Calls an action of the end, whose failure must not hide the error that ended the run.

        Args:
            what: the problem's name, for the log; it does not matter once the log is closed.
            action: the action.

        Returns:
            The exception of the action, or None.
        """
        try:
            action()
        except Exception as problem:
            self.problems.append(f"{what}: {type(problem).__name__}: {problem}")
            return problem
        return None

    def _all_ranks_end(self) -> bool:
        """Whether all ranks end after this step. Waits for them if the loop has ended by itself.

        A rank that ends alone, or a step before the others, must not wait for them: it would hang
        until the timeout of the collective.

        Returns:
            True if collective calls are possible from here on, so that the ranks can save together.
        """
        if not self.completed:
            return self.run.end_requests.ends_together or self.run.ranks.world == 1
        if self.run.ranks.world > 1:
            what = (
                "another rank has not ended its loop (give every rank as many batches, and leave "
                "the loop at the same step on all ranks)"
            )
            self.raised = self._collect(what, partial(self.run.ranks.gather, None))
        return self.raised is None

    def _read_last_steps(self) -> None:
        """Reads the last steps, and carries out their orders where the run can still go back.

        The host reads each step some steps late. The last checkpoint is saved after all of them.
        """
        failed = "the last steps could not be read"
        if isinstance(self.error, Terminated | Interrupted | EndRequested):
            try:
                self._collect(failed, self._act_on_last_steps)
            except RunStopped as stop:
                self.error, self.ending = stop, Ending.STOPPED
        if self.completed:
            problem = self._collect(failed, self.run.loop.report_last_steps)
            error = self.run.progress.reading_error
            if error is not None:
                # Raised, as for any earlier step: the next start would take the run for completed.
                self.error = self.raised = error
                self.ending = Ending.EXCEPTION
                self.completed = False
                self.fault = classify(error)
                if problem is error:
                    self.problems.pop()  # the line of the fault says the same

    def _act_on_last_steps(self) -> None:
        """Carries out the orders of the last steps, at an end between two steps.

        If the program has replaced the weights, nothing is saved, and the orders are only reported.
        """
        loop = self.run.loop
        if not loop.count_last_step():
            return
        if self.replaced:  # an order may compare the weights, which the training has not made
            loop.report_last_steps()
        else:
            loop.read_and_act(every=True)

    def _find_replaced_weights(self) -> None:
        """Finds whether the program has replaced weights, so that they must not be saved.

        An evaluation of averaged weights puts them in the place of the trained weights. A restart
        from such a checkpoint would train on from the averages, and nothing would show it.
        """
        if self.run.saver.resumes_exactly and not self.run.driver.is_interrupted():
            self.replaced = self.run.driver.replaced_weights()

    def _replaced_text(self) -> str:
        """Reason why replaced weights are not saved.

        Returns:
            A clause for the log that names the weights and the checkpoint from which a restart
            resumes, or an empty string if no weights are replaced.
        """
        if not self.replaced:
            return ""
        return (
            f"the program has replaced weights since step {self.run.progress.step} "
            f"({first_of(self.replaced)}), as for an evaluation of averaged weights, and a restart "
            "must not train on from them; it resumes from the checkpoint of step "
            f"{self.run.schedule.last_saved}"
        )

    def _save_last_state(self, *, together: bool, may_save: bool) -> None:
        """Saves the last state, and sets the ending of a loop that has ended by itself.

        Args:
            together: whether all ranks end after this step.
            may_save: whether the state is complete, so that a restart may resume from it.
        """
        completed = self.completed
        saved = may_save or self.run.loop.state.is_complete
        if self.run.loop.state.is_complete:
            if together and completed and self.by != "exit":
                self._collect("the saved state could not be loaded again", self._load_again)
        elif together and saved:
            # A trainer may load its best weights after its loop: the run ends with the loop.
            after_loop = self.by == "exit" or self.run.loop.has_trainer
            save = partial(self.run.saver.save_last, completed=completed, after_loop=after_loop)
            saved = self._collect("the last state could not be saved", save) is None
        self._collect("checkpoints being written", self.run.saver.wait)
        if completed and (not together or self._is_lost_on_any_rank(saved)):
            # Not "completed", so that the next start resumes and saves the run.
            self.error = LastStateNotSaved(self._unsaved_state_text())
            self.ending = Ending.EXCEPTION
        elif completed:
            after_loop = self.by == "exit" and self.run.loop.state.at_rest
            self.error = incomplete_run_error(self.run, judges_weights=not after_loop)
            self.ending = ending_of(self.run, self.error)
            if self.error is None and self.run.loop.state.break_place and self.by != "close":
                self.ending = Ending.REQUESTED

    def _load_again(self) -> None:
        """Loads the last state of a completed run once more, at the end of its block.

        The code after the loop has run in the process that completed the run, and its effect is in
        the saved state, such as best weights. In this process it has run on other values.
        """
        if self.run.driver.state_is_in_place and not self.run.loop.has_trainer:
            self.run.stored_checkpoints.load_step(self.run.progress.step)

    def _save_before_batches(self) -> None:
        """Saves the state before the batches that were read for the next step.

        A stop file may end the run after the loop has read a batch that no step has used. A restart
        from this save reads the batch again. If the save is impossible, a warning says why.
        """
        obstacle = self.run.saver.save_emergency(self._replaced_text())
        if obstacle:
            self.run.loop.warn(f"no checkpoint was saved at the end: {obstacle}")

    def _save_and_log_fault(self, fault: Fault, raised: Exception) -> None:
        """Saves if a rule of the policy says so, and logs the exception that ends the run.

        Args:
            fault: the classified exception.
            raised: the exception.
        """
        obstacle = ""
        answer = None
        # The ranks that have not raised do not take part in a save; memory ends with the process.
        answers = self.run.policy.answers(fault.cause)
        if fault.hint:  # an error of the program, which a rule for unknown errors may save
            answers |= self.run.policy.answers(Cause.UNKNOWN)
        if self.run.progress.reading_error is not None:
            obstacle = "the records of a step could not be read"
            if isinstance(raised, SignalError):
                obstacle = "loss_fn is wrong, and the next start begins before these steps"
        elif self.run.saver.resumes_exactly and "save" in answers:
            obstacle = "the exception interrupted the updates of a step"
            try:
                if self.run.loop.count_last_step():
                    self.run.loop.report_last_steps()
                    obstacle = "a restart repeats the step, whose evaluation or log is incomplete"
                    if not self.run.loop.state.has_unfinished_work:
                        obstacle = self.run.saver.save_emergency(self._replaced_text())
            except StoreError as problem:
                obstacle = str(problem)
            except Exception as problem:  # a step in JAX that failed may have donated the state
                obstacle = f"{type(problem).__name__}: {problem}"
            if not obstacle:
                answer = "save"
        problem = f"the program raised {error_text(raised):.600}"
        line = problem.partition("\n")[0]  # Python prints the rest with the traceback
        if Cause.OOM in fault.cause:
            self.memory_text = f". {memory_text(self.run.driver, self.run.log)}"
            advice = self.run.out_of_memory.advice()
            if advice and not self.run.loop.has_trainer:
                self.memory_text += f". {advice}"
            problem += self.memory_text
            line += self.memory_text
        self.run.log.fault(self.run.progress.step, fault, problem, line, answer=answer)
        if obstacle:
            self.run.loop.warn(f"no checkpoint of the state at the exception was saved: {obstacle}")

    def _is_lost_on_any_rank(self, saved: bool) -> bool:
        """Whether the last state is lost on any rank. Collective.

        A rank that does not answer counts as lost. A store in memory ends with the process in any
        case, so nothing counts as lost there.

        Args:
            saved: whether this rank's last save has succeeded.
        """
        lost = self.run.store.durable and (
            self.run.progress.step in self.run.saver.unsaved or not saved
        )
        answers: list[bool] = []

        def ask() -> None:
            answers.extend(self.run.ranks.gather(lost))

        if self._collect("another rank has left", ask) is not None:
            return True
        return any(answers)

    def _unsaved_state_text(self) -> str:
        """The message about a last state that no checkpoint holds.

        Returns:
            The step of the end, the reason, and the checkpoint from which the next start resumes.
            If the store cannot be read, the checkpoint is not named by its step.
        """
        step = self.run.progress.step
        saver = self.run.saver
        target = "resumes from the newest checkpoint"
        with contextlib.suppress(StoreError, OSError):
            # Only these checkpoints survive the process.
            newest = max(self.run.store.steps_on_disk(), default=None)
            if newest is None:
                target = "starts from the beginning"
            else:
                target = f"resumes from the checkpoint of step {newest}"
        remedy = "Remove the cause and start the program again: it"
        why = saver.unsaved.get(step) or self._replaced_text()
        if self.replaced:
            remedy = "Call healer.close() directly after the loop. The next start"
        why = why or next(iter(self.problems), "it failed on another rank")
        return (
            f"healcore: the loop has ended at step {step}, and its last state is not saved "
            f"({why}). {remedy} {target}"
        )
