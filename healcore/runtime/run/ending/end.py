"""`end_run`: the end of a run, in its order.

    last steps     read, and their orders carried out where the run can still go back
    fault          an exception of the program is classified and logged, and saved if a rule says so
    last save      the state of the last step
    judgement      a loop that has ended by itself may be incomplete (`completeness.py`)
    report         postmortem, event `end`, last line (`reports.py`)

After a kill, the next start writes the postmortem (`postmortem.write_for_killed`). Errors at the
end are logged and not raised, because they would hide the error that has ended the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from healcore.console import error_text, first_of
from healcore.core.decision import Cause
from healcore.core.signals import SignalError
from healcore.events.models import Ending
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.run import reports
from healcore.runtime.run.ending.completeness import incomplete_run_error, report_recoveries
from healcore.runtime.run.ending.exits import (
    AlreadyCompleted,
    EndRequested,
    Interrupted,
    LastStateNotSaved,
    RunEnd,
    RunStopped,
    Terminated,
)
from healcore.runtime.run.out_of_memory import memory_text
from healcore.runtime.run.process_runs import remember_completed
from healcore.runtime.store.checkpoints import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


EndedBy = Literal["block", "close", "exit"]
"""What ends the run: the end of its block, `Healer.close`, or for `healcore.start` the end of the
process."""
T = TypeVar("T")


def end_run(run: Run, error: BaseException | None, *, by: EndedBy = "block") -> RunEnd:
    """Ends a run. Nothing raises on the way: what fails is a line of the log.

    Args:
        run: the parts of the run.
        error: the exception that left the block, or None.
        by: what ends the run.

    Returns:
        How the run has ended. Its error is another one than `error` if the last steps have stopped
        the run, or if a loop that has ended by itself is not complete.
    """
    run.end = RunEnd(Ending.EXCEPTION, error)  # no loop acts any more
    run.end = _End(run, error, by).carry_out()
    return run.end


class _End:
    """The end of one run, and what its steps find out about it."""

    def __init__(self, run: Run, error: BaseException | None, by: EndedBy) -> None:
        self.run = run
        self.state = run.loop.state
        self.error = error
        """The exception that ends the run, or None."""
        self.by = by
        self.replaced = ""
        """Why weights that the program has replaced since the last step are not saved, or ""."""
        self.together = False
        """Whether all ranks end after this step, so that they can save together."""
        self.fault = Fault(Cause(0), "")
        """The classified exception of the program."""
        self.memory = ""
        """A sentence about what holds the memory after an out-of-memory error, or ""."""

    def carry_out(self) -> RunEnd:
        """Ends the run, in the order of the module's docstring."""
        run, state = self.run, self.state
        if state.is_complete and isinstance(self.error, AlreadyCompleted):
            self.error = None  # the loop has raised no error
        if (self.by == "exit" and state.at_rest) or (state.is_complete and self.error is None):
            self._try("the steps after the loop were not dropped", run.driver.take_dispatch)
        run.hang_guard.pause()
        run.driver.on_end()
        tried = self.error if state.searches_batch_size else None
        if tried is not None and classify(tried).cause is Cause.OOM:
            return self._discard()
        self.replaced = self._replaced_weights()
        self.together = self._all_ranks_end()
        if self.together:
            self._read_last_steps()
        self._try("the damage could not be assessed", partial(report_recoveries, run))
        raised = self.error
        if raised is not None and raised is run.stopping.stopped:
            raised = raised.__cause__
        if isinstance(raised, Exception):
            self._log_fault(raised)
        problem = self._save_completed() if self.error is None else self._save_early_end()
        self._try("checkpoints being written", run.saver.wait)
        if self.error is None:
            self.error = self._judge(problem)
        if self.together:
            self._try("checkpoints on probation", run.saver.poll)
            self._try("the last saves", run.saver.read_nonfinite)
        ending = self._kind()
        if ending == Ending.COMPLETED and not state.is_complete:
            run.record.completed = True
            replace = partial(run.saver.replace_record, run.progress.step)
            self._try("the record of the end", replace)
            if run.store.root is not None:
                remember_completed(run.store.root)
        reports.report_end(run, ending, self.error, self.fault, self.memory)
        self._close_parts()
        return RunEnd(ending, self.error)

    def _try(self, what: str, action: Callable[[], T]) -> T | None:
        """The result of an action of the end, or None if it fails, which is logged."""
        try:
            return action()
        except Exception as error:
            self.run.loop.warn(f"{what}: {type(error).__name__}: {error}")
            return None

    def _kind(self) -> Ending:
        """The kind of the end. The stop of another run is an exception like any other."""
        error = self.error
        if error is None:
            left_early = self.state.break_place and self.by != "close"
            return Ending.REQUESTED if left_early else Ending.COMPLETED
        if error is self.run.stopping.stopped:
            return Ending.STOPPED
        if isinstance(error, Terminated):
            return Ending.SIGNAL
        if isinstance(error, KeyboardInterrupt):
            return Ending.INTERRUPTED
        return Ending.REQUESTED if isinstance(error, EndRequested) else Ending.EXCEPTION

    def _discard(self) -> RunEnd:
        """Ends a run that has taken no step, and deletes its first snapshot.

        Called if memory ran out while a trainer searches its batch size, before the first step. The
        next run then starts again, instead of from a snapshot for another batch size.
        """
        with suppress(Exception):
            self.run.saver.wait()
            self.run.store.delete(self.run.record.first_step)
        self.run.log.info(
            "memory ran out before the first step: the trainer begins again with a smaller batch"
        )
        self._close_parts()
        return RunEnd(Ending.EXCEPTION, self.error)

    def _close_parts(self) -> None:
        """Closes the parts of the run. It is too late to report their errors, so they go."""
        run = self.run
        self.state.end_run()
        for close in (
            run.hang_guard.close,
            run.end_requests.stop_watching,
            run.store.join,
            run.driver.close,
            *(claim.release for claim in run.claims),
            run.log.close,
        ):
            with suppress(Exception):
                close()

    # -- the last steps -------------------------------------------------------------------------

    def _replaced_weights(self) -> str:
        """See the attribute `replaced`.

        An evaluation of averaged weights puts them in the place of the trained weights. A restart
        from such a checkpoint would train on from the averages, and nothing would show it. What a
        program does with its weights after its loop, until the end of a block, belongs to a
        completed run.
        """
        run = self.run
        in_block = self.error is None and self.by != "exit"
        if in_block or not run.saver.resumes_exactly or run.driver.is_interrupted():
            return ""
        names = self._try("the weights could not be read", run.driver.replaced_weights)
        if not names:
            return ""
        return (
            f"the program has replaced weights since step {run.progress.step} ({first_of(names)}), "
            "as for an evaluation of averaged weights, and a restart must not train on from them; "
            f"it resumes from the checkpoint of step {run.schedule.last_saved}"
        )

    def _all_ranks_end(self) -> bool:
        """See the attribute `together`. Waits for the other ranks at the end of a loop.

        A rank that ends alone, or a step before the others, must not wait for them: it would hang
        until the timeout of the collective.
        """
        run = self.run
        if run.ranks.world == 1 or self.error is not None:
            return run.ranks.world == 1 or run.end_requests.ends_together
        what = (
            "another rank has not ended its loop (give every rank as many batches, and leave the "
            "loop at the same step on all ranks)"
        )
        return self._try(what, partial(run.ranks.gather, None)) is not None

    def _read_last_steps(self) -> None:
        """Reads the last steps, and carries out their orders where the run can still go back.

        The host reads each step some steps late. The last checkpoint is saved after all of them. If
        the program has replaced the weights, nothing is saved, and the orders are only reported: an
        order may compare the weights.
        """
        loop, progress, error = self.run.loop, self.run.progress, self.error
        try:
            if error is None:
                loop.report_last_steps()
            elif isinstance(error, Terminated | Interrupted | EndRequested):
                is_counted = loop.count_last_step()
                if is_counted and self.replaced:
                    loop.report_last_steps()
                elif is_counted:
                    loop.read_and_act(every=True)
        except RunStopped as stop:
            self.error = stop
        except Exception as problem:
            # Otherwise the line of the fault says the same.
            if error is not None or problem is not progress.reading_error:
                loop.warn(f"the last steps could not be read: {type(problem).__name__}: {problem}")
        # Raised, as for any earlier step: the next start would take the run for completed.
        self.error = self.error or progress.reading_error

    def _log_fault(self, raised: Exception) -> None:
        """Logs the exception that ends the run, and saves if a rule of the policy says so.

        The ranks that have not raised do not take part in a save; memory ends with the process.
        """
        run, fault = self.run, classify(raised)
        self.fault = fault
        answer, obstacle = None, ""
        if isinstance(run.progress.reading_error, SignalError):
            obstacle = "loss_fn is wrong, and the next start begins before these steps"
        elif run.progress.reading_error is not None:
            obstacle = "the records of a step could not be read"
        elif run.saver.resumes_exactly and "save" in run.policy.answers(fault.cause):
            try:
                obstacle = self._save_at_exception()
            except Exception as problem:  # a step in JAX that failed may have donated the state
                is_known = isinstance(problem, StoreError)
                obstacle = str(problem) if is_known else f"{type(problem).__name__}: {problem}"
            if not obstacle:
                answer = "save"
        if Cause.OOM in fault.cause:
            self.memory = f". {memory_text(run)}"
        problem = f"the program raised {error_text(raised):.600}"
        run.log.fault(run.progress.step, fault, problem + self.memory, answer=answer)
        if obstacle:
            run.loop.warn(f"no checkpoint of the state at the exception was saved: {obstacle}")

    # -- the last save --------------------------------------------------------------------------

    def _save_at_exception(self) -> str:
        """Saves the state of the last step. Returns the reason why not, or an empty string."""
        loop = self.run.loop
        if not loop.count_last_step():
            return "the exception interrupted the updates of a step"
        loop.report_last_steps()
        if self.state.has_unfinished_work:
            return "a restart repeats the step, whose evaluation or log is incomplete"
        return self.run.saver.save_emergency(self.replaced)

    def _save_early_end(self) -> str:
        """Saves the state of the last step if the program was left between two steps.

        A stop saves nothing: the policy has rejected the weights. If the run ends within an
        optimizer step, an evaluation or the work of a trainer after its step, a restart repeats the
        step. If batches were read that no step has used, only a stop file saves the state before
        them.
        """
        run, error, batches = self.run, self.error, self.run.step_batches
        self._try("the last step could not be counted", run.loop.count_last_step)
        within_step = run.driver.pending_steps() or run.driver.is_interrupted()
        rejected = error is run.stopping.stopped or run.progress.reading_error is not None
        if rejected or not self.together or within_step or self.state.has_unfinished_work:
            return ""
        can_return = run.saver.resumes_exactly and not batches.within_batch
        if not (batches.between_steps or (can_return and isinstance(error, EndRequested))):
            return ""
        if not self.replaced:
            has_trainer = run.loop.has_trainer
            save = partial(run.saver.save_last, completed=False, after_loop=has_trainer)
            self._try("the last state could not be saved", save)
        elif run.progress.step != run.schedule.last_saved and not isinstance(error, Exception):
            run.loop.warn(f"no checkpoint was saved at the end: {self.replaced}")
        return ""

    def _save_completed(self) -> str:
        """Saves the last state of a loop that has ended by itself.

        In a run that an earlier process has completed, the saved state is loaded once more. The
        code after the loop has run in the process that completed the run, and its effect is in the
        saved state, such as best weights. In this process it has run on other values.

        Returns:
            Why the state is not saved, or an empty string.
        """
        run, step, has_trainer = self.run, self.run.progress.step, self.run.loop.has_trainer
        if not self.together:
            return "another rank has failed or has not ended its loop"
        if self.state.is_complete:
            if self.by != "exit" and run.driver.state_is_in_place and not has_trainer:
                load = partial(run.stored_checkpoints.load_step, step)
                self._try("the saved state could not be loaded again", load)
            return ""
        if self.replaced:
            return self.replaced if step != run.schedule.last_saved else ""
        # A trainer may load its best weights after its loop: the run ends with the loop.
        after_loop = self.by == "exit" or has_trainer

        def save() -> str:
            run.saver.save_last(completed=True, after_loop=after_loop)
            return ""

        problem = self._try("the last state could not be saved", save)
        return "the save has failed" if problem is None else problem

    def _judge(self, problem: str) -> BaseException | None:
        """The exception for a loop that has ended by itself and is not complete, or None.

        A run whose last state is lost on a rank is not complete: the next start resumes and saves
        it.

        Args:
            problem: why the last state is not saved, or an empty string.
        """
        run, step = self.run, self.run.progress.step
        problem = run.saver.unsaved.get(step) or problem
        if self.together:
            ask = partial(run.ranks.gather, run.store.durable and bool(problem))
            lost = self._try("another rank has left", ask)
            if lost is not None and not any(lost):
                at_rest = self.by == "exit" and self.state.at_rest
                return incomplete_run_error(run, judges_weights=not at_rest)
        newest = None
        with suppress(StoreError, OSError):  # only these checkpoints survive the process
            newest = max(run.store.steps_on_disk(), default=None)
        target = "starts from the beginning"
        if newest is not None:
            target = f"resumes from the checkpoint of step {newest}"
        remedy = "Remove the cause and start the program again: it"
        if self.replaced:
            remedy = "Call healer.close() directly after the loop. The next start"
        return LastStateNotSaved(
            f"healcore: the loop has ended at step {step}, and its last state is not saved "
            f"({problem or 'it failed on another rank'}). {remedy} {target}"
        )
