"""`end_run`: the end of a run, in its order.

    last steps     read, and their orders carried out where the run can still go back
    fault          an exception of the program is classified and logged, and saved if a rule says so
    last save      the state of the last step
    judgement      a loop that has ended by itself may be incomplete (`completeness.py`)
    report         postmortem, event `end`, last line (`reports.py`)

Errors at the end are logged and not raised, because they would hide the error that has ended the
run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from healcore.console import error_text, first_of
from healcore.core.decision import Cause
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
from healcore.runtime.run.progress import LoopPhase
from healcore.runtime.store.checkpoints import StoreError

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


EndedBy = Literal["block", "close", "exit"]
"""What ends the run: the end of its block, `Healer.close`, or for `healcore.start` the end of the
process."""
T = TypeVar("T")


def end_run(run: Run, error: BaseException | None, *, by: EndedBy = "block") -> RunEnd:
    """Ends a run, in the order of the module's docstring.

    Nothing raises on the way: what fails is a line of the log.

    Args:
        run: the parts of the run.
        error: the exception that left the block, or None.
        by: what ends the run.

    Returns:
        How the run has ended. Its error is another one than `error` if the last steps have stopped
        the run, or if a loop that has ended by itself is not complete.
    """
    run.end = RunEnd(Ending.EXCEPTION, error)  # no loop acts any more
    state = run.loop.state
    if state.is_complete and isinstance(error, AlreadyCompleted):
        error = None  # the loop has raised no error
    rests = by == "exit" and state.phase is LoopPhase.AT_REST
    if rests or (state.is_complete and error is None):
        _try(run, "the steps after the loop were not dropped", run.driver.take_dispatch)
    run.hang_guard.pause()
    run.driver.on_end()
    # What a program does with its weights after its loop, until the end of a block, belongs to a
    # completed run.
    in_block = error is None and by != "exit"
    replaced = "" if in_block else _replaced_weights(run)
    together = _all_ranks_end(run, error)
    if together:
        error = _read_last_steps(run, error, acts=not replaced)
    _try(run, "the damage could not be assessed", partial(report_recoveries, run))
    stopped = error is not None and error is run.stopping.stopped
    raised = error.__cause__ if error is not None and stopped else error
    fault, memory, problem, save_was_tried = Fault(Cause(0), ""), "", "", False
    if isinstance(raised, Exception):
        fault = classify(raised)
        memory = f"; {memory_text(run)}" if fault.cause is Cause.OOM else ""
        save_was_tried = _save_at_exception(run, raised, fault, memory, replaced)
    if error is None:
        problem = _save_completed(run, by, together=together, replaced=replaced)
    elif not save_was_tried and together and not stopped and run.progress.reading_error is None:
        _save_early_end(run, replaced, by_stop_file=isinstance(error, EndRequested))
    _try(run, "checkpoints being written", run.saver.wait)
    if error is None:
        error = _judge(run, problem, replaced, together=together, rests=rests)
    if together:
        _try(run, "checkpoints on probation", run.saver.poll)
        _try(run, "the last saves", run.saver.read_nonfinite)
    run.end = RunEnd(_kind_of(run, error, by), error)
    if run.end.ending == Ending.COMPLETED and not state.is_complete:
        run.record.completed = True
        replace = partial(run.saver.replace_record, run.progress.step)
        _try(run, "the record of the end", replace)
        if run.store.root is not None:
            run.completed.add(run.store.root.resolve())
    reports.report_end(run, *run.end, fault, memory)
    _close_parts(run)
    return run.end


def _try(run: Run, what: str, action: Callable[[], T]) -> T | None:
    """The result of an action of the end, or None if it fails, which is logged."""
    try:
        return action()
    except Exception as error:
        run.loop.warn(f"{what}: {type(error).__name__}: {error}")
        return None


def _kind_of(run: Run, error: BaseException | None, by: EndedBy) -> Ending:
    """The kind of the end. The stop of another run is an exception like any other."""
    if error is None:
        left_early = run.loop.state.break_place and by != "close"
        return Ending.REQUESTED if left_early else Ending.COMPLETED
    if error is run.stopping.stopped:
        return Ending.STOPPED
    if isinstance(error, KeyboardInterrupt):
        return Ending.INTERRUPTED
    return getattr(error, "ending", Ending.EXCEPTION)


def _close_parts(run: Run) -> None:
    """Closes the parts of the run. It is too late to report their errors, so they go."""
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


def _replaced_weights(run: Run) -> str:
    """Why weights that the program has replaced since the last step are not saved, or "".

    An evaluation of averaged weights puts them in the place of the trained weights. A restart from
    such a checkpoint would train on from the averages, and nothing would show it.
    """
    if not run.saver.resumes_exactly or run.driver.is_interrupted():
        return ""
    names = _try(run, "the weights could not be read", run.driver.replaced_weights)
    if not names:
        return ""
    return (
        f"the program has replaced weights since step {run.progress.step} ({first_of(names)}), "
        "as for an evaluation of averaged weights, and a restart must not train on from them; "
        f"it resumes from the checkpoint of step {run.schedule.last_saved}"
    )


def _all_ranks_end(run: Run, error: BaseException | None) -> bool:
    """Whether all ranks end after this step, so that they can save together.

    Waits for the other ranks at the end of a loop. A rank that ends alone, or a step before the
    others, must not wait for them: it would hang until the timeout of the collective.
    """
    if run.ranks.world == 1 or error is not None:
        return run.ranks.world == 1 or run.end_requests.ends_together
    what = (
        "another rank has not ended its loop (give every rank as many batches, and leave the "
        "loop at the same step on all ranks)"
    )
    return _try(run, what, partial(run.ranks.gather, None)) is not None


def _read_last_steps(run: Run, error: BaseException | None, *, acts: bool) -> BaseException | None:
    """Reads the last steps, and carries out their orders where the run can still go back.

    The host reads each step some steps late. The last checkpoint is saved after all of them. If the
    program has replaced the weights, nothing is saved, and the orders are only reported: an order
    may compare the weights.

    Returns:
        The exception that ends the run, which an order may have raised, or None.
    """
    loop, progress = run.loop, run.progress
    try:
        if error is None:
            loop.report_last_steps()
        elif isinstance(error, Terminated | Interrupted | EndRequested) and loop.count_last_step():
            if acts:
                loop.read_and_act(every=True)
            else:
                loop.report_last_steps()
    except RunStopped as stop:
        error = stop
    except Exception as problem:
        # Otherwise the line of the fault says the same.
        if error is not None or problem is not progress.reading_error:
            loop.warn(f"the last steps could not be read: {type(problem).__name__}: {problem}")
    # Raised, as for any earlier step: the next start would take the run for completed.
    return error or progress.reading_error


# -- the last save ---------------------------------------------------------------------------------


def _save_at_exception(
    run: Run, raised: Exception, fault: Fault, memory: str, replaced: str
) -> bool:
    """Logs the exception that ends the run, and saves if a rule of the policy says so.

    The ranks that have not raised do not take part in a save; memory ends with the process.

    Returns:
        Whether a save was tried or refused here: then the end does not try another one.
    """
    answer, obstacle = None, ""
    if run.progress.reading_error is not None:
        obstacle = "the records of a step could not be read"
    elif run.saver.resumes_exactly and "save" in run.policy.answers(fault.cause):
        try:
            obstacle = _save_emergency(run, replaced)
        except Exception as problem:  # a step in JAX that failed may have donated the state
            is_known = isinstance(problem, StoreError)
            obstacle = str(problem) if is_known else f"{type(problem).__name__}: {problem}"
        answer = None if obstacle else "save"
    line = f"the program raised {error_text(raised):.600}{memory}"
    run.log.fault(run.progress.step, fault, line, answer=answer)
    if obstacle:
        run.loop.warn(f"no checkpoint of the state at the exception was saved: {obstacle}")
    return bool(answer or obstacle)


def _save_emergency(run: Run, replaced: str) -> str:
    """Saves the state of the last step. Returns the reason why not, or an empty string."""
    if not run.loop.count_last_step():
        return "the exception interrupted the updates of a step"
    run.loop.report_last_steps()
    if run.loop.state.has_unfinished_work:
        return "a restart repeats the step, whose evaluation or log is incomplete"
    return run.saver.save_emergency(replaced)


def _save_early_end(run: Run, replaced: str, *, by_stop_file: bool) -> None:
    """Saves the state of the last step if the program was left between two steps.

    If the run ends within an optimizer step, an evaluation or the work of a trainer after its step,
    a restart repeats the step. If batches were read that no step has used, only a stop file saves
    the state before them.
    """
    _try(run, "the last step could not be counted", run.loop.count_last_step)
    within_step = run.driver.pending_steps() or run.driver.is_interrupted()
    if within_step or run.loop.state.has_unfinished_work:
        return
    can_return = run.saver.resumes_exactly and not run.step_batches.within_batch
    if not (run.step_batches.between_steps or (can_return and by_stop_file)):
        return
    if not replaced:
        has_trainer = run.loop.has_trainer
        save = partial(run.saver.save_last, completed=False, after_loop=has_trainer)
        _try(run, "the last state could not be saved", save)
    elif run.progress.step != run.schedule.last_saved:
        run.loop.warn(f"no checkpoint was saved at the end: {replaced}")


def _save_completed(run: Run, by: EndedBy, *, together: bool, replaced: str) -> str:
    """Saves the last state of a loop that has ended by itself.

    In a run that an earlier process has completed, the saved state is loaded once more. The code
    after the loop has run in the process that completed the run, and its effect is in the saved
    state, such as best weights. In this process it has run on other values.

    Returns:
        Why the state is not saved, or an empty string.
    """
    step, has_trainer = run.progress.step, run.loop.has_trainer
    if not together:
        return "another rank has failed or has not ended its loop"
    if run.loop.state.is_complete:
        if by != "exit" and run.driver.state_is_in_place and not has_trainer:
            load = partial(run.way_back.load_step, step)
            _try(run, "the saved state could not be loaded again", load)
        return ""
    if replaced:
        return replaced if step != run.schedule.last_saved else ""
    try:
        # A trainer may load its best weights after its loop: the run ends with the loop.
        run.saver.save_last(completed=True, after_loop=by == "exit" or has_trainer)
    except Exception as error:
        run.loop.warn(f"the last state could not be saved: {type(error).__name__}: {error}")
        return "the save has failed"
    return ""


def _judge(
    run: Run, problem: str, replaced: str, *, together: bool, rests: bool
) -> BaseException | None:
    """The exception for a loop that has ended by itself and is not complete, or None.

    A run whose last state is lost on a rank is not complete: the next start resumes and saves it.

    Args:
        run: the parts of the run.
        problem: why the last state is not saved, or an empty string.
        replaced: see `_replaced_weights`.
        together: see `_all_ranks_end`.
        rests: whether the weights are what the program has made of them after its loop.
    """
    step = run.progress.step
    problem = run.saver.unsaved.get(step) or problem
    if together:
        ask = partial(run.ranks.gather, run.store.durable and bool(problem))
        lost = _try(run, "another rank has left", ask)
        if lost is not None and not any(lost):
            return incomplete_run_error(run, judges_weights=not rests)
    remedy = "Remove the cause and start the program again"
    if replaced:
        remedy = "Call healer.close() directly after the loop"
    return LastStateNotSaved(
        f"healcore: the loop has ended at step {step}, and its last state is not saved "
        f"({problem or 'it failed on another rank'}). {remedy}. The next start resumes from the "
        "newest checkpoint"
    )
