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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

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

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


EndedBy = Literal["block", "close", "exit"]
"""What ends the run: the end of its block, `Healer.close`, or for `healcore.start` the end of the
process."""


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
        with _logged(run, "the steps after the loop were not dropped"):
            run.driver.take_dispatch()
    run.hang_guard.pause()
    run.driver.on_end()
    # What a program does with its weights after its loop, until the end of a block, belongs to a
    # completed run.
    in_block = error is None and by != "exit"
    if in_block:
        replaced = ""
    else:
        replaced = _replaced_weights(run)
    together = _all_ranks_end(run, error)
    if together:
        error = _read_last_steps(run, error, acts=not replaced)
    with _logged(run, "the damage could not be assessed"):
        report_recoveries(run)
    fault, memory, problem = Fault(Cause(0), ""), "", ""
    if error is None:
        problem = _save_completed(run, by, together=together, replaced=replaced)
    else:
        stopped = error is run.stopping.stopped
        if stopped:
            raised = error.__cause__
        else:
            raised = error
        rule_saves = False
        if isinstance(raised, Exception):
            fault = classify(raised)
            if fault.cause is Cause.OOM:
                memory = f"; {memory_text(run)}"
            rule_saves = run.saver.resumes_exactly and "save" in run.policy.answers(fault.cause)
        if run.progress.reading_error is not None:
            problem = "the records of a step could not be read"
        elif rule_saves or (together and not stopped):
            by_file = isinstance(error, EndRequested)
            problem = _save_early_end(run, replaced, rule_saves=rule_saves, by_file=by_file)
        if isinstance(raised, Exception):
            if rule_saves and not problem:
                answer = "save"
            else:
                answer = None
            line = f"the program raised {error_text(raised):.600}{memory}"
            run.log.fault(run.progress.step, fault, line, answer=answer)
        if problem:
            run.loop.warn(f"no checkpoint was saved at the end: {problem}")
    with _logged(run, "checkpoints being written"):
        run.saver.wait()
    if error is None:
        error = _judge(run, problem, replaced, together=together, rests=rests)
    if together:
        with _logged(run, "checkpoints on probation"):
            run.saver.poll()
        with _logged(run, "the last saves"):
            run.saver.read_nonfinite()
    run.end = RunEnd(_kind_of(run, error, by), error)
    if run.end.ending == Ending.COMPLETED and not state.is_complete:
        run.record.completed = True
        with _logged(run, "the record of the end"):
            run.saver.replace_record(run.progress.step)
        if run.store.root is not None:
            run.completed.add(run.store.root.resolve())
    reports.report_end(run, *run.end, fault, memory)
    _close_parts(run)
    return run.end


@contextmanager
def _logged(run: Run, what: str) -> Iterator[None]:
    """A context of an action of the end. If it fails, a line is logged, and the end goes on."""
    try:
        yield
    except Exception as error:
        run.loop.warn(f"{what}: {type(error).__name__}: {error}")


def _kind_of(run: Run, error: BaseException | None, by: EndedBy) -> Ending:
    """The kind of the end. The stop of another run is an exception like any other."""
    if error is None:
        left_early = run.loop.state.break_place and by != "close"
        if left_early:
            return Ending.REQUESTED
        return Ending.COMPLETED
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
    names: Sequence[str] = ()
    with _logged(run, "the weights could not be read"):
        names = run.driver.replaced_weights()
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
    with _logged(run, what):
        run.ranks.gather(None)
        return True
    return False


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


def _save_early_end(run: Run, replaced: str, *, rule_saves: bool, by_file: bool) -> str:
    """Saves the state of the last step of a loop that was left by an exception.

    If the run ends within an optimizer step, an evaluation or the work of a trainer after its step,
    a restart repeats the step. If batches were read that no step has used, a rule of the policy or
    a stop file saves the state before them.

    Args:
        run: the parts of the run. The ranks that have not raised do not take part in a save.
        replaced: see `_replaced_weights`.
        rule_saves: whether a rule of the policy saves at this exception.
        by_file: whether a stop file ends the run.

    Returns:
        Why nothing was saved although it was tried, or an empty string.
    """
    saver = run.saver
    try:
        counted = run.loop.count_last_step()
        if rule_saves and not counted:
            return "the exception interrupted the updates of a step"
        if rule_saves:
            run.loop.report_last_steps()
        elif run.driver.pending_steps() or run.driver.is_interrupted():
            return ""
        if run.loop.state.has_unfinished_work:
            return "a restart repeats the step, whose evaluation or log is incomplete"
        if rule_saves:
            return saver.save_emergency(replaced)
        can_return = by_file and saver.resumes_exactly and not run.step_batches.within_batch
        if not (can_return or run.step_batches.between_steps):
            return ""
        if replaced:
            if run.progress.step != run.schedule.last_saved:
                return replaced
            return ""
        saver.save_last(completed=False, after_loop=run.loop.has_trainer)
    except Exception as problem:  # a step in JAX that failed may have donated the state
        return f"{type(problem).__name__}: {problem}"
    return ""


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
            with _logged(run, "the saved state could not be loaded again"):
                run.way_back.load_step(step)
        return ""
    if replaced:
        if step != run.schedule.last_saved:
            return replaced
        return ""
    try:
        # A trainer may load its best weights after its loop: the run ends with the loop.
        run.saver.save_last(completed=True, after_loop=by == "exit" or has_trainer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
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
        lost = [True]
        with _logged(run, "another rank has left"):
            lost = run.ranks.gather(run.store.durable and bool(problem))
        if not any(lost):
            return incomplete_run_error(run, judges_weights=not rests)
    remedy = "Remove the cause and start the program again"
    if replaced:
        remedy = "Call healer.close() directly after the loop"
    return LastStateNotSaved(
        f"healcore: the loop has ended at step {step}, and its last state is not saved "
        f"({problem or 'it failed on another rank'}). {remedy}. The next start resumes from the "
        "newest checkpoint"
    )
