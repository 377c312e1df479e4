"""Ends a run: saves the last state, writes the reports, and closes the files.

After a kill, the next start writes the postmortem (`postmortem.of_killed`). Errors at the end are
logged and not raised, because they would hide the error that has ended the run.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial

from healcore.console import counted
from healcore.core.verdict import Cause, names
from healcore.events.models import Ending
from healcore.runtime.faults import Fault, classify
from healcore.runtime.faults.classify import is_broken_connection
from healcore.runtime.faults.failures import causes_of
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.termination import (
    EndRequested,
    IncompleteRun,
    Interrupted,
    LastStateNotSaved,
    RunStopped,
    Terminated,
)
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.diagnosis import AFTER_A_KILL, last_line
from healcore.runtime.postmortem.rank_notes import RankNote, of_ranks, traces
from healcore.runtime.store import StoreError

_FAULT_ENDINGS = (Ending.EXCEPTION, Ending.STOPPED)
"""Endings that an exception may have caused."""
_VISIBLE_S = 2.0
"""Seconds within which rank 0 sees the note of a rank whose connection has broken."""
_LENGTH_ADVICE = (
    "give every rank as many batches (torch's DistributedSampler does, or itertools.islice), and "
    "leave the loop at the same step on all ranks; ranks that train on wait for this rank until "
    "the time-out of their process group"
)
_RECOMMENDED_LOOPS = {
    "jax": "for batch in healer.batches(loader): state = healer.update(step(healer.state, batch))",
    "torch": "for batch in healer.batches(loader): ...; loss.backward(); optimizer.step()",
}
"""Framework -> recommended loop."""


def ending_of(error: BaseException | None, signal_number: int | None = None) -> Ending:
    """Ending of a run, by the error that left its block and by the signal that it received."""
    endings = {
        type(None): Ending.COMPLETED,
        RunStopped: Ending.STOPPED,
        Terminated: Ending.SIGNAL,
        KeyboardInterrupt: Ending.INTERRUPTED,
        EndRequested: Ending.REQUESTED,
    }
    for cls, ending in endings.items():
        if isinstance(error, cls):
            return ending
    # torch's loader raises when the signal has killed its workers too.
    killed = signal_number == signal.SIGTERM and "DataLoader worker" in str(error)
    return Ending.SIGNAL if killed else Ending.EXCEPTION


def close(loop: Loop, error: BaseException | None) -> BaseException | None:
    """Ends a run. Returns an exception for the block to raise instead of `error`, or None."""
    loop.guard.pause()
    ranks, saver, data = loop.ranks, loop.saver, loop.data
    ending = ending_of(error, ranks.termination.signal_number)
    raised = error.__cause__ if isinstance(error, RunStopped) else error
    problems: list[str] = []

    def attempt(what: str, action: Callable[[], object]) -> Exception | None:
        try:
            action()
        except Exception as problem:
            problems.append(f"{what}: {type(problem).__name__}: {problem}")
            return problem
        return None

    # A rank that ends alone, or a step before the others, must not wait for them.
    completed = ending == Ending.COMPLETED
    saved, together = True, completed or ranks.ends_together or ranks.world == 1
    if completed and ranks.world > 1:
        raised = attempt("another rank has left", partial(_wait_for_ranks, loop))
        together = raised is None
    is_fault = completed or ending in _FAULT_ENDINGS
    fault = classify(raised) if is_fault and raised is not None else None
    notes = [] if together else _collect_notes(loop, ending, error or raised, fault)
    if completed and together:
        attempt("the last steps could not be read", loop.read_remaining)
    replacement: BaseException | None = None
    if together and isinstance(error, Terminated | Interrupted | EndRequested):
        try:  # a restart from a later state would not see the orders of the last steps
            attempt("the last steps could not be read", loop.act_on_last_steps)
        except RunStopped as stop:
            error = replacement = stop
            ending = Ending.STOPPED
    between_steps = data.between_steps
    other = notes[0] if notes and notes[0].rank != ranks.rank else None
    if other is not None:
        fault = _report_fault_of_rank(loop, other)
    elif fault is not None and isinstance(raised, Exception):  # the cause of a stop too
        attempt(
            "the fault could not be dealt with", partial(_save_and_log_fault, loop, fault, raised)
        )
    if together and (ending == Ending.COMPLETED or (between_steps and ending != Ending.STOPPED)):
        # Not after an exception within a step, which leaves the state partly changed.
        save = partial(saver.save_last, completed=completed)
        saved = attempt("the last state could not be saved", save) is None
    attempt("checkpoints being written", saver.wait)
    if completed and (not together or _is_lost_on_any_rank(loop, saved, problems)):
        # Not "completed", so that the next start resumes and saves the run.
        error = replacement = LastStateNotSaved(_unsaved_state_text(loop, problems))
        ending = Ending.EXCEPTION
    elif completed:
        error = replacement = _incomplete_run_error(loop)
        ending = ending_of(error)
        if error is None and loop.break_place:
            ending = Ending.REQUESTED
    if together:
        attempt("checkpoints on probation", saver.poll)
        attempt("the last saves", saver.read_nonfinite)
        if ranks.votes:
            attempt("reports of other ranks", partial(ranks.vote, data.step, loop.log))
    if ending == Ending.COMPLETED:
        attempt("the record of the end", partial(_record_end, loop))
    for problem in problems:
        loop.warn(problem)
    loop.log.report_trackers(data.step)
    if isinstance(error, RunStopped) and ranks.rank:
        error.code = f"healcore stopped the run: {error.why} (rank 0 has the diagnosis)"
    cause = Cause(0) if fault is None else fault.cause
    if other is not None and other.ending not in (None, Ending.COMPLETED):
        ending = other.ending  # the first rank to end determines the ending
    _write_end(loop, ending, error, cause, notes)
    if not ranks.rank:
        loop.notes.remove()
    for close_part in (
        loop.guard.close,
        ranks.close,
        saver.store.join,
        loop.driver.close,
        partial(release, loop),
        loop.log.close,
    ):
        with contextlib.suppress(Exception):
            close_part()
    return replacement


def release(loop: Loop) -> None:
    """Releases the store's directory."""
    if loop.claim is not None:
        loop.claim.release()


# -- several ranks --------------------------------------------------------------------------------


def _wait_for_ranks(loop: Loop) -> None:
    """Waits for the end of all ranks' loops. Raises RuntimeError or OSError if a rank has left."""
    if loop.ranks.rank:
        why = f"its loop has ended, and it waits for the other ranks: {_LENGTH_ADVICE}"
        loop.notes.leave(_own_note(loop, Ending.COMPLETED, why=why))
    loop.ranks.gather(None)


def _collect_notes(
    loop: Loop, ending: Ending, error: BaseException | None, fault: Fault | None
) -> list[RankNote]:
    """Notes of the ended ranks on rank 0, the cause first. Other ranks leave a note for rank 0."""
    completed = ending == Ending.COMPLETED
    note = _own_note(loop, Ending.EXCEPTION if completed else ending, error, fault)
    if loop.ranks.rank:
        if all(each.rank != note.rank for each in loop.notes.found()):  # see `_wait_for_ranks`
            loop.notes.leave(note)
        return []
    until = time.monotonic() + (_VISIBLE_S if note.follows else 0.0)
    while True:
        others = loop.notes.found()
        others.sort(key=lambda each: (each.follows, each.ending == Ending.COMPLETED))
        if completed:  # other completed ranks are not the cause
            others = [each for each in others if each.ending != Ending.COMPLETED]
        if any(not each.follows for each in others) or time.monotonic() >= until:
            break
        time.sleep(0.1)
    if others and note.follows and not others[0].follows:
        return [*others, note]
    if is_broken_connection(error):
        lost = f"the connection to another rank broke, and no rank has said why: {AFTER_A_KILL}"
        note = note.model_copy(update={"why": lost})
    return [note, *others]


def _own_note(
    loop: Loop,
    ending: Ending,
    error: BaseException | None = None,
    fault: Fault | None = None,
    *,
    why: str = "",
) -> RankNote:
    """The note about the end of this rank."""
    what = trace = ""
    if error is not None:
        what, trace = described(error)
    waited = fault is not None and (Cause.HANG in fault.cause or fault.sign.startswith("nccl"))
    return RankNote(
        rank=loop.ranks.rank,
        ending=ending,
        step=loop.data.step,
        why=why or _why(error) or what,
        trace=trace,
        cause=[] if fault is None else list(names(fault.cause)),
        sign="" if fault is None else fault.sign,
        follows=waited or is_broken_connection(error),
        time=time.time(),
    )


def _report_fault_of_rank(loop: Loop, note: RankNote) -> Fault | None:
    """Logs the exception of another rank, which has ended the run."""
    if not note.cause:
        return None
    fault = Fault(causes_of(note.cause), note.sign)
    problem = f"the loop raised on rank {note.rank}: {note.why:.600}"
    loop.log.fault(loop.data.step, fault, problem, answer=None)
    return fault


# -- the last state -------------------------------------------------------------------------------


def _save_and_log_fault(loop: Loop, fault: Fault, error: Exception) -> None:
    """Saves if a rule of the policy says so, and logs the exception that ends the run."""
    answer, why_not = None, ""
    # The ranks that have not raised do not take part in a save; memory ends with the process.
    alone = loop.ranks.world == 1 and loop.saver.store.durable
    if alone and "save" in loop.policy.answers(fault.cause):
        try:
            if loop.count_last_step():
                loop.read_last_steps()
                why_not = loop.saver.save_emergency()
            else:
                why_not = "the exception interrupted the optimizer's update"
        except Exception as problem:  # a step in JAX that failed may have donated the state
            why_not = f"{type(problem).__name__}: {problem}"
        answer = None if why_not else "save"
    problem = f"the loop raised {described(error)[0]:.600}"
    loop.log.fault(loop.data.step, fault, problem, answer=answer)
    if why_not:
        loop.warn(f"no checkpoint was saved at the exception: {why_not}")


def _is_lost_on_any_rank(loop: Loop, saved: bool, problems: list[str]) -> bool:
    """Whether the last state is lost on any rank. A rank that does not answer counts as lost."""
    saver = loop.saver
    lost = loop.data.step in saver.unsaved or not saved
    lost = lost and saver.store.durable  # memory ends with the process in any case
    try:
        return any(loop.ranks.gather(lost))
    except Exception as problem:
        problems.append(f"another rank has left: {type(problem).__name__}: {problem}")
        return True


def _unsaved_state_text(loop: Loop, problems: list[str]) -> str:
    saver = loop.saver
    try:  # the checkpoints that survive the process
        newest = max((save.step for save in saver.store.steps_on_disk()), default=None)
        target = "starts from the beginning"
        if newest is not None:
            target = f"resumes from the checkpoint of step {newest}"
    except (StoreError, OSError):
        target = "resumes from the newest checkpoint"
    why = saver.unsaved.get(loop.data.step) or next(iter(problems), "it failed on another rank")
    return (
        f"healcore: the loop has ended at step {loop.data.step}, and its last state is not saved "
        f"({why}). Remove the cause and start the program again: it {target}"
    )


def _incomplete_run_error(loop: Loop) -> BaseException | None:
    """The exception for a loop that has ended by itself with an incomplete run, or None."""
    data, ledger = loop.data, loop.recovery.ledger
    unread = len(data.unused)
    loop_text = _RECOMMENDED_LOOPS[loop.driver.framework]
    if data.steps_taken and not loop.polled:
        return IncompleteRun(
            "healcore: the loop took its steps without the Healer, which could not save between "
            f"them, roll back or stop. Write `{loop_text}`, or call healer.after_step() after each "
            "step. The last state is saved"
        )
    if not data.steps_taken and (data.step == 0 or (unread and not loop.break_place)):
        read = counted(unread, "batch", "batches")
        return IncompleteRun(
            f"healcore: the loop has ended, and the Healer has seen no step ({read} read). Write "
            f"`{loop_text}`. Nothing was trained: the next start begins at step {data.step}"
        )
    skipped = data.skipped_steps
    untrained, total = ledger.untrained, data.step + skipped
    try:
        loop.recovery.stop_if_never_finite(at_end=True)
        if not loop.policy.observes and 2 * (untrained + skipped) > total:
            loop.recovery.stop(
                "the data have ended, and the run has not trained on most of them: of "
                f"{total} steps, {untrained} were skipped and {skipped} had their batches skipped"
            )
    except RunStopped as stop:
        return stop
    has_ended = data.had_completed or data.repeated or loop.reached_end or loop.break_place
    if data.resumed_here and not (has_ended or loop.has_trainer):
        return IncompleteRun(
            f"healcore: the run was resumed at step {data.step}, and the loop has ended without a "
            "step. A loop of epochs begins with `for epoch in healer.epochs(n)`, and reads "
            "healer.batches(loader, epoch=epoch). If the run has no more steps, an empty directory "
            "begins a new run"
        )
    return None


# -- reports --------------------------------------------------------------------------------------


def _record_end(loop: Loop) -> None:
    """Notes in the last checkpoint that the run has completed."""
    loop.record.completed = True
    loop.saver.commit(loop.data.step)


def _write_end(
    loop: Loop,
    ending: Ending,
    error: BaseException | None,
    fault: Cause,
    notes: list[RankNote],
) -> None:
    """Writes the postmortem and the last event. `notes`: result of `_collect_notes`.

    The postmortem comes first: a start writes a missing postmortem only without the event `end`.
    """
    with contextlib.suppress(Exception):  # a step in JAX that failed may have donated the state
        loop.recovery.read_engines()
    why = loop.break_place if ending == Ending.REQUESTED and error is None else _why(error)
    exception = trace = None
    if notes and notes[0].rank != loop.ranks.rank and ending != Ending.EXCEPTION:
        why = f"rank {notes[0].rank}: {notes[0].why}"
    if notes and ending == Ending.EXCEPTION:
        exception, trace = f"rank {notes[0].rank}: {notes[0].why}", traces(notes) or None
    elif ending == Ending.EXCEPTION and error is not None:
        exception, trace = described(error)
    end = loop.recovery.run_end(ending, why, exception=exception, fault=fault)
    events = loop.log.events
    problem = None
    if events.path is not None and not loop.ranks.rank:
        problem = postmortem.write(events.path, end, trace=trace, lost=events.lost)
    if problem:
        loop.log.warning(problem)
    loop.log.event(
        "end",
        step=end.step,
        ending=end.ending,
        incidents=end.counts.incidents,
        rollbacks=end.counts.rollbacks,
        last_good=end.last_good,
        unreported_alarms=loop.recovery.monitor.unreported_alarms or None,
        of_ranks=of_ranks(notes) or None,
    )
    data = loop.data
    saves = [saved for saved in loop.recovery.listed() if saved.status != "abandoned"]
    newest = max((saved.step for saved in saves if saved.path), default=None)
    if ending == Ending.COMPLETED and data.had_completed and data.resumed_here:
        loop.log.warning(
            f"completed earlier, at step {data.step}: nothing was trained, and the state is the "
            "saved state; an empty directory begins a new run"
        )
    else:
        loop.log.info(last_line(end, newest))


def described(error: BaseException) -> tuple[str, str]:
    """The summary of an exception, and its traceback."""
    what = "".join(traceback.format_exception_only(error)).strip()
    return what, "".join(traceback.format_exception(error))


def _why(error: BaseException | None) -> str:
    return error.why if isinstance(error, RunStopped | EndRequested | Terminated) else ""
