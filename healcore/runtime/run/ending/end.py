"""`end_run`: the end of a run, in its order.

After a kill, the next start writes the postmortem (`postmortem.write_for_killed`). Errors at the
end are logged and not raised, because they would hide the error that has ended the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from healcore.console import error_text, first_of
from healcore.core.decision import Cause
from healcore.core.signals import SignalError
from healcore.events.models import Ending
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.run.ending.completeness import incomplete_run_error, report_recoveries
from healcore.runtime.run.ending.end_report import explain_nan, write_report
from healcore.runtime.run.ending.exits import (
    AlreadyCompleted,
    EndRequested,
    Interrupted,
    LastStateNotSaved,
    RunStopped,
    Terminated,
)
from healcore.runtime.run.memory_profile import memory_text
from healcore.runtime.store.checkpoints import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


EndedBy = Literal["block", "close", "exit"]
"""What ends the run: the end of its block, `Healer.close`, or for `healcore.start` the end of the
process."""

_ENDINGS = {
    Terminated: Ending.SIGNAL,
    KeyboardInterrupt: Ending.INTERRUPTED,
    EndRequested: Ending.REQUESTED,
}
"""The exceptions of a request to end -> kind of the end."""
T = TypeVar("T")


class RunEnd(NamedTuple):
    """How a run has ended."""

    ending: Ending
    """The kind of the end."""
    error: BaseException | None
    """The exception that has ended the run: of the program, of healcore, or None."""


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
    state = run.loop.state
    if state.is_complete and isinstance(error, AlreadyCompleted):
        error = None  # the loop has raised no error
    if (by == "exit" and state.at_rest) or (state.is_complete and error is None):
        _attempt(run, "the steps after the loop were not dropped", run.driver.take_dispatch)
    run.hang_guard.pause()
    run.driver.on_end()
    if state.searches_batch_size and error is not None and classify(error).cause is Cause.OOM:
        return _discard(run, error)
    replaced = _replaced_weights(run, completed=error is None and by != "exit")
    together = _all_ranks_end(run, completed=error is None)
    if together:
        error = _read_last_steps(run, error, replaced)
    raised = error
    if error is not None and error is run.stopping.stopped:
        raised = error.__cause__
    _attempt(run, "the damage could not be assessed", partial(report_recoveries, run))
    fault, memory, problem = Fault(Cause(0), ""), "", ""
    if isinstance(raised, Exception):
        fault, memory = _save_and_log_fault(run, raised, replaced)
    if error is None:
        problem = _save_completed(run, replaced, together=together, by=by)
    else:
        _save_early_end(run, error, replaced, together=together)
    _attempt(run, "checkpoints being written", run.saver.wait)
    if error is None:
        error = _judge(run, problem, replaced, together=together, by=by)
    if together:
        _attempt(run, "checkpoints on probation", run.saver.poll)
        _attempt(run, "the last saves", run.known_checkpoints.read_nonfinite)
    ending = _ending_of(run, error, by)
    if ending == Ending.COMPLETED and not state.is_complete:
        run.record.completed = True
        step = run.progress.step
        _attempt(run, "the record of the end", partial(run.saver.replace_record, step))
    explain = partial(explain_nan, run, raised, fault)
    _attempt(run, "the values at the exception could not be read", explain)
    write_report(run, ending, error, fault, memory)
    _close_parts(run)
    return RunEnd(ending, error)


def _ending_of(run: Run, error: BaseException | None, by: EndedBy) -> Ending:
    """The kind of the end. The stop of another run is an exception like any other."""
    if error is None:
        left_early = run.loop.state.break_place and by != "close"
        return Ending.REQUESTED if left_early else Ending.COMPLETED
    if error is run.stopping.stopped:
        return Ending.STOPPED
    for kind, ending in _ENDINGS.items():
        if isinstance(error, kind):
            return ending
    return Ending.EXCEPTION


def _attempt(run: Run, what: str, action: Callable[[], T], otherwise: T | None = None) -> T | None:
    """The result of an action of the end. Logs its problem, and returns `otherwise` then."""
    try:
        return action()
    except Exception as error:
        run.loop.warn(f"{what}: {type(error).__name__}: {error}")
        return otherwise


def _discard(run: Run, error: BaseException) -> RunEnd:
    """Ends a run that has taken no step, and deletes its first snapshot.

    Called if memory ran out while a trainer searches its batch size, before the first step. The
    next run then starts again, instead of from a snapshot for another batch size.
    """
    with suppress(Exception):
        run.saver.wait()
        run.store.delete(run.record.first_step)
    run.log.info(
        "memory ran out before the first step: the trainer begins again with a smaller batch"
    )
    _close_parts(run)
    return RunEnd(Ending.EXCEPTION, error)


def _close_parts(run: Run) -> None:
    """Closes the parts of the run. It is too late to report their errors, so they are dropped."""
    run.loop.state.end_run()
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


# -- the last steps --------------------------------------------------------------------------------


def _all_ranks_end(run: Run, *, completed: bool) -> bool:
    """Whether all ranks end after this step, so that they can save together.

    A rank that ends alone, or a step before the others, must not wait for them: it would hang until
    the timeout of the collective. Waits for the other ranks if the loop has ended by itself.
    """
    if run.ranks.world == 1 or not completed:
        return run.ranks.world == 1 or run.end_requests.ends_together
    what = (
        "another rank has not ended its loop (give every rank as many batches, and leave the loop "
        "at the same step on all ranks)"
    )
    return _attempt(run, what, partial(run.ranks.gather, None)) is not None


def _read_last_steps(run: Run, error: BaseException | None, replaced: str) -> BaseException | None:
    """Reads the last steps, and carries out their orders where the run can still go back.

    The host reads each step some steps late. The last checkpoint is saved after all of them. If the
    program has replaced the weights, nothing is saved, and the orders are only reported: an order
    may compare the weights.

    Returns:
        The exception that ends the run, or None.
    """
    loop = run.loop
    try:
        if error is None:
            loop.report_last_steps()
        elif isinstance(error, Terminated | Interrupted | EndRequested) and loop.count_last_step():
            if replaced:
                loop.report_last_steps()
            else:
                loop.read_and_act(every=True)
    except RunStopped as stop:
        return stop
    except Exception as problem:
        # Otherwise the line of the fault says the same.
        if error is not None or problem is not run.progress.reading_error:
            loop.warn(f"the last steps could not be read: {type(problem).__name__}: {problem}")
    # Raised, as for any earlier step: the next start would take the run for completed.
    return error or run.progress.reading_error


def _replaced_weights(run: Run, *, completed: bool) -> str:
    """Why weights that the program has replaced since the last step are not saved, or "".

    An evaluation of averaged weights puts them in the place of the trained weights. A restart from
    such a checkpoint would train on from the averages, and nothing would show it. What a program
    does with its weights after its loop, until the end of a block, belongs to a completed run.
    """
    if completed or not run.saver.resumes_exactly or run.driver.is_interrupted():
        return ""
    names = _attempt(run, "the weights could not be read", run.driver.replaced_weights)
    if not names:
        return ""
    return (
        f"the program has replaced weights since step {run.progress.step} ({first_of(names)}), as "
        "for an evaluation of averaged weights, and a restart must not train on from them; it "
        f"resumes from the checkpoint of step {run.schedule.last_saved}"
    )


# -- the last save ---------------------------------------------------------------------------------


def _save_and_log_fault(run: Run, raised: Exception, replaced: str) -> tuple[Fault, str]:
    """Saves if a rule of the policy says so, and logs the exception that ends the run.

    Args:
        run: the parts of the run.
        raised: the exception, also as the cause of a stop.
        replaced: see `_replaced_weights`.

    Returns:
        The classified exception, and a sentence about what holds the memory after an out-of-memory
        error, or an empty string.
    """
    fault = classify(raised)
    # The ranks that have not raised do not take part in a save; memory ends with the process.
    answers = run.policy.answers(fault.cause)
    if fault.hint:  # an error of the program, which a rule for unknown errors may save
        answers |= run.policy.answers(Cause.UNKNOWN)
    answer, obstacle = None, ""
    if run.progress.reading_error is not None:
        obstacle = "the records of a step could not be read"
        if isinstance(raised, SignalError):
            obstacle = "loss_fn is wrong, and the next start begins before these steps"
    elif run.saver.resumes_exactly and "save" in answers:
        try:
            obstacle = _save_at_exception(run, replaced)
        except StoreError as problem:
            obstacle = str(problem)
        except Exception as problem:  # a step in JAX that failed may have donated the state
            obstacle = f"{type(problem).__name__}: {problem}"
        if not obstacle:
            answer = "save"
    memory = ""
    if Cause.OOM in fault.cause:
        memory = f". {memory_text(run.driver, run.log)}"
        advice = run.out_of_memory.advice()
        if advice and not run.loop.has_trainer:
            memory += f". {advice}"
    problem = f"the program raised {error_text(raised):.600}"
    line = problem.partition("\n")[0] + memory  # Python prints the rest with the traceback
    run.log.fault(run.progress.step, fault, problem + memory, line, answer=answer)
    if obstacle:
        run.loop.warn(f"no checkpoint of the state at the exception was saved: {obstacle}")
    return fault, memory


def _save_at_exception(run: Run, replaced: str) -> str:
    """Saves the state of the last step. Returns the reason why not, or an empty string."""
    if not run.loop.count_last_step():
        return "the exception interrupted the updates of a step"
    run.loop.report_last_steps()
    if run.loop.state.has_unfinished_work:
        return "a restart repeats the step, whose evaluation or log is incomplete"
    return run.saver.save_emergency(replaced)


def _save_early_end(run: Run, error: BaseException, replaced: str, *, together: bool) -> None:
    """Saves the state of the last step if the program was left between two steps.

    A stop saves nothing: the policy has rejected the weights. If the run ends within an optimizer
    step, an evaluation or the work of a trainer after its step, a restart repeats the step. If
    batches were read that no step has used, only a stop file saves the state before them.
    """
    _attempt(run, "the last step could not be counted", run.loop.count_last_step)
    batches, saver = run.step_batches, run.saver
    is_within_step = run.driver.pending_steps() or run.driver.is_interrupted()
    rejected = error is run.stopping.stopped or run.progress.reading_error is not None
    if rejected or not together or is_within_step or run.loop.state.has_unfinished_work:
        return
    can_return = saver.resumes_exactly and not batches.within_batch
    if not (batches.between_steps or (can_return and isinstance(error, EndRequested))):
        return
    if not replaced:
        save = partial(saver.save_last, completed=False, after_loop=run.loop.has_trainer)
        _attempt(run, "the last state could not be saved", save)
    elif run.progress.step != run.schedule.last_saved and not isinstance(error, Exception):
        run.loop.warn(f"no checkpoint was saved at the end: {replaced}")


def _save_completed(run: Run, replaced: str, *, together: bool, by: EndedBy) -> str:
    """Saves the last state of a loop that has ended by itself.

    In a run that an earlier process has completed, the saved state is loaded once more. The code
    after the loop has run in the process that completed the run, and its effect is in the saved
    state, such as best weights. In this process it has run on other values.

    Returns:
        Why the state is not saved, or an empty string.
    """
    has_trainer, step = run.loop.has_trainer, run.progress.step
    if not together:
        return "another rank has failed or has not ended its loop"
    if run.loop.state.is_complete:
        if by != "exit" and run.driver.state_is_in_place and not has_trainer:
            load = partial(run.stored_checkpoints.load_step, step)
            _attempt(run, "the saved state could not be loaded again", load)
        return ""
    if replaced:
        return replaced if step != run.schedule.last_saved else ""
    # A trainer may load its best weights after its loop: the run ends with the loop.
    after_loop = by == "exit" or has_trainer
    save = partial(run.saver.save_last, completed=True, after_loop=after_loop)
    return _attempt(run, "the last state could not be saved", save, "the save has failed") or ""


def _judge(
    run: Run, problem: str, replaced: str, *, together: bool, by: EndedBy
) -> BaseException | None:
    """The exception for a loop that has ended by itself and is not complete, or None.

    A run whose last state is lost on a rank is not complete: the next start resumes and saves it.

    Args:
        run: the parts of the run.
        problem: why the last state is not saved, or an empty string.
        replaced: see `_replaced_weights`.
        together: whether all ranks end after this step.
        by: what ends the run.
    """
    step = run.progress.step
    problem = run.saver.unsaved.get(step) or problem
    ask = partial(run.ranks.gather, run.store.durable and bool(problem))
    if together and not any(_attempt(run, "another rank has left", ask) or [True]):
        after_loop = by == "exit" and run.loop.state.at_rest
        return incomplete_run_error(run, judges_weights=not after_loop)
    target = "resumes from the newest checkpoint"
    with suppress(StoreError, OSError):
        # Only these checkpoints survive the process.
        newest = max(run.store.steps_on_disk(), default=None)
        target = f"resumes from the checkpoint of step {newest}"
        if newest is None:
            target = "starts from the beginning"
    remedy = "Remove the cause and start the program again: it"
    if replaced:
        remedy = "Call healer.close() directly after the loop. The next start"
    return LastStateNotSaved(
        f"healcore: the loop has ended at step {step}, and its last state is not saved "
        f"({problem or 'it failed on another rank'}). {remedy} {target}"
    )
