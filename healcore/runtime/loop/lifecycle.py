"""The start of a run, and its end in every way that leaves the process time for it.

The next start writes the postmortem of a process that was killed (`postmortem.of_killed`). Errors
at the end are reported and not raised: they would hide the error that has ended the run.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from healcore.core.verdict import Cause, names
from healcore.runtime.events import read
from healcore.runtime.events.models import Ending, RollbackOutcome
from healcore.runtime.faults import Fault, classify
from healcore.runtime.faults.classify import is_broken_connection
from healcore.runtime.faults.shapes import shape_diagnosis
from healcore.runtime.loop import start_of_ranks
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.run_facts import run_end, shortfall
from healcore.runtime.loop.run_lines import end_line, start_line
from healcore.runtime.loop.run_settings import (
    RunSettings,
    SettingsChange,
    record_end,
    record_start,
    start_rate,
)
from healcore.runtime.loop.termination import (
    EndRequested,
    Interrupted,
    LastStateNotSaved,
    RunStopped,
    Terminated,
)
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.diagnosis import AFTER_A_KILL
from healcore.runtime.postmortem.rank_notes import RankNote, of_ranks, traces
from healcore.runtime.recovery.journal import (
    JournalState,
    lost_status,
    no_usable_checkpoint,
    refuse_if_lost,
)
from healcore.runtime.recovery.rollback import Rollback
from healcore.runtime.store import NoGoodCheckpoint, Saved, StoreError
from healcore.runtime.store.ranks import agreed


def begin(
    loop: Loop,
    settings: RunSettings,
    change: SettingsChange | None,
    *,
    resume: bool,
    died: Any | None,
) -> None:
    """Resumes, or takes the first snapshot.

    `settings` are those of this start, and `change` is their difference from an earlier start.
    `died` is the postmortem of a killed predecessor.
    """
    loop.restorer.find_damage()
    if not resume:
        _begin_lineage(loop)
    state = loop.journal.state
    completed_at = state.newest_on_disk if state.ending == Ending.COMPLETED else None
    loop.out_of_memory.resume()
    loop.checkpoints.allow_nonfinite(state.nonfinite_ok or [])
    _repeat_quarantine(loop)
    if died is not None:
        loop.log.warning("the previous run was killed; its postmortem was written")
    if state.plan is not None:
        _finish_rollback(loop, state.plan)
    elif resume:
        _resume(loop)
    loop.recovery.resume_rerun(state.rollback, loop.step)
    loop.read_engines()
    loop.had_completed = resume and loop.step == completed_at
    state.ending = None
    record_start(loop.journal, settings)
    loop.restorer.write_journal(loop.step)
    loop.set_start(loop.step, resumed=resume)
    loop.checkpoints.reload()
    if resume:  # otherwise the first save does it
        loop.keep_anchor()
    if not resume:
        _allow_nonfinite(loop)
        loop.save("first")
    loop.termination.start()
    line = start_line(
        loop.policy,
        loop.step,
        _checkpoints(loop),
        resumed=resume,
        learning_rate=start_rate((state.settings or {}).get("saved", {})),
        batch=settings.batch(loop.ranks.world),
    )
    loop.log.info(line)
    if change is not None and any(change):
        loop.warn(
            f"other settings than at the start of this run (saved -> given): {change}. To train "
            "with new settings from the start, pass an empty directory"
        )


def _begin_lineage(loop: Loop) -> None:
    """Begins a new run; raises NoGoodCheckpoint if the directory has lost its checkpoints."""
    journal = loop.journal
    refuse_if_lost(journal, loop.restorer.damage)
    if journal.state != JournalState():
        loop.warn(
            f"{journal.path} is of a process that ended before a checkpoint was on disk: a new run "
            "begins, and replaces the file"
        )
    journal.state = JournalState(
        lineage=agreed(loop.ranks, loop.log.events.run), first_step=loop.step
    )


def _repeat_quarantine(loop: Loop) -> None:
    """Quarantines checkpoints again that have lost their status file; the journal lists them."""
    journal, done = loop.journal, set[int]()
    while True:  # each quarantine may uncover an older checkpoint of the same step
        found = agreed(loop.ranks, lost_status(loop.restorer.saves(), journal).quarantined)
        steps = [step for step in found if step not in done]
        if not steps:
            return
        done.update(steps)
        loop.warn(
            f"the status of checkpoint {', '.join(map(str, steps))} is damaged or missing; by "
            f"{journal.path} it was quarantined, and it stays quarantined"
        )
        loop.checkpoints.quarantine(steps, now=loop.step)


def _allow_nonfinite(loop: Loop) -> None:
    """Allows NaN and Inf in the arrays that have some before the first step."""
    names = loop.checkpoints.allow_nonfinite_in(loop.driver.items())
    if names:
        loop.journal.state.nonfinite_ok = names
        loop.restorer.write_journal(loop.step)
        shown = ", ".join(names[:5])
        loop.warn(f"not finite from the start, so NaN and Inf are allowed in: {shown}")


def _resume(loop: Loop) -> None:
    saves, journal = loop.restorer.saves(), loop.journal
    usable = [s.step for s in saves if s.finite and s.status != "quarantined"]
    unknown = set(agreed(loop.ranks, lost_status(saves, journal).unknown))
    try:
        if not usable:
            raise no_usable_checkpoint(journal, saves, loop.restorer.damage)
        newest_first = sorted(usable, reverse=True)
        # One with a damaged status may have been quarantined: it is the last choice.
        order = sorted(newest_first, key=unknown.__contains__)
        if journal.state.first_step is None:  # the journal was deleted
            journal.state.first_step = min(usable)
        step, generators = loop.restorer.resume(order)
    except NoGoodCheckpoint as error:
        raise no_usable_checkpoint(journal, saves, loop.restorer.damage) from error
    loop.set_restored(step, generators)
    for error in loop.restorer.unfit:
        loop.warn(f"{error}. The run resumes from the older checkpoint of step {step}, which fits")
        unknown.add(error.step)
    # Otherwise the run would treat it as one of its own once it has passed its step.
    loop.checkpoints.quarantine([at for at in unknown if at > step], now=step)
    last = journal.state.rollback
    if last is not None and not _is_logged(loop, last.number):
        loop.recovery.log_rollback(last, RollbackOutcome.AFTER_CRASH)
    loop.log.event("resume", step=step, checkpoint=step)
    damaged = {error.step: error for error in loop.restorer.damage if error.step > step}
    skipped = [saved for saved in saves if saved.step > step and saved.step not in damaged]
    if skipped:
        which = ", ".join(_reason(saved) for saved in skipped)
        loop.log.info(f"checkpoints newer than {step} cannot be used: {which}")
    if damaged:
        which = "; ".join(f"{at} ({e.file} {e.difference})" for at, e in sorted(damaged.items()))
        loop.log.warning(f"checkpoints newer than {step} are damaged: {which}")


def _reason(saved: Saved) -> str:
    return f"{saved.step} ({saved.status if saved.finite else 'not finite'})"


def _finish_rollback(loop: Loop, plan: Rollback) -> None:
    """Finishes a rollback during which the previous process was killed."""
    try:
        host = loop.restorer.finish(plan)
        loop.set_restored(plan.target, host)
    except NoGoodCheckpoint as error:
        damage = loop.restorer.damage
        raise no_usable_checkpoint(loop.journal, loop.restorer.saves(), damage) from error
    loop.recovery.log_rollback(plan, RollbackOutcome.AFTER_CRASH)
    loop.log.warning(f"finished an interrupted rollback: back at step {loop.step}")


def _is_logged(loop: Loop, number: int) -> bool:
    """Whether a rollback has its event; the process may have been killed just before."""
    path = loop.log.events.path
    if loop.journal.state.ending is not None or path is None:
        return True
    try:
        if not path.is_file():
            return True
        events = read(path).events
    except OSError:
        return True
    return any(e["kind"] == "rollback" and e.get("number") == number for e in events)


def _checkpoints(loop: Loop) -> str:
    """Where checkpoints go, for the first line."""
    store = loop.checkpoints.store
    if store.disk is None:
        return "checkpoints in host memory only"
    return f"checkpoints in {type(store).__name__ if store.root is None else store.root}"


# -- the end --------------------------------------------------------------------------------------


def ending_of(error: BaseException | None, signal_number: int | None = None) -> Ending:
    """How a run ended, by the error that left its block and a signal that it has received."""
    if error is None:
        return Ending.COMPLETED
    if isinstance(error, RunStopped):
        return Ending.STOPPED
    # torch's loader raises when the signal has killed its workers too.
    killed = signal_number == signal.SIGTERM and "DataLoader worker" in str(error)
    if isinstance(error, Terminated) or killed:
        return Ending.SIGNAL
    if isinstance(error, KeyboardInterrupt):
        return Ending.INTERRUPTED
    if isinstance(error, EndRequested):
        return Ending.REQUESTED
    return Ending.EXCEPTION


_OF_FAULTS = (Ending.EXCEPTION, Ending.STOPPED)
"""Endings that an exception may have brought about."""
_VISIBLE_S = 2.0
"""Seconds within which rank 0 sees the note of a rank whose connection has broken."""
_OTHER_LENGTHS = (
    "give every rank as many batches (torch's DistributedSampler does, or itertools.islice), and "
    "leave the loop at the same step on all ranks; ranks that train on wait for this rank until "
    "the time-out of their process group"
)


def close(loop: Loop, error: BaseException | None) -> BaseException | None:
    """Ends a run; returns what the block has to raise instead of `error`, if anything.

    LastStateNotSaved although the loop has completed.
    """
    loop.guard.pause()
    ending = ending_of(error, loop.termination.signal_number)
    raised = error.__cause__ if isinstance(error, RunStopped) else error
    problems: list[str] = []

    def attempt(what: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as problem:
            problems.append(f"{what}: {type(problem).__name__}: {problem}")
            return False
        return True

    # A rank that ends alone, or a step before the others, must not wait for them.
    completed = ending == Ending.COMPLETED
    saved, together = True, completed or loop.ends_together or loop.ranks.world == 1
    if completed and loop.ranks.world > 1:
        try:
            _meet(loop)
        except Exception as problem:
            together, raised = False, problem
            problems.append(f"another rank has left: {type(problem).__name__}: {problem}")
    is_fault = completed or ending in _OF_FAULTS
    fault = classify(raised) if is_fault and raised is not None else None
    notes = [] if together else _notes(loop, ending, error or raised, fault)
    if completed and together:
        attempt("the last steps could not be read", loop.read_remaining)
    instead: BaseException | None = None
    if together and isinstance(error, Terminated | Interrupted | EndRequested):
        try:  # what the last steps order is not ordered again after a restart from a later state
            attempt("the last steps could not be read", loop.act_on_last_steps)
        except RunStopped as stop:
            error = instead = stop
            ending = Ending.STOPPED
    between_steps = loop.between_steps
    other = notes[0] if notes and notes[0].rank != loop.ranks.rank else None
    if other is not None:
        fault = _report_other(loop, other)
    elif fault is not None and isinstance(raised, Exception):  # the cause of a stop too
        attempt("the fault could not be dealt with", partial(_answer, loop, fault, raised))
    if together and (ending == Ending.COMPLETED or (between_steps and ending != Ending.STOPPED)):
        # Not after an exception within a step, which leaves the state half changed.
        waiting = loop.waiting_batches()
        save = partial(loop.last_state.save, loop.step, waiting, completed=completed)
        saved = attempt("the last state could not be saved", save)
    attempt("checkpoints being written", loop.checkpoints.wait)
    if completed and (not together or _lost_on_any(loop, saved, problems)):
        # The journal must not have "completed": the program started again resumes and saves it.
        error = instead = LastStateNotSaved(_not_saved(loop, problems))
        ending = Ending.EXCEPTION
    elif completed:
        error = instead = shortfall(loop)
        ending = ending_of(error)
        if error is None and loop.left_by_break:
            ending = Ending.REQUESTED
    if together:
        attempt("checkpoints on probation", lambda: loop.checkpoints.finish(loop.ledger, loop.step))
        attempt("the last saves", loop.checkpoints.nonfinite_checkpoints)
        if loop.votes.possible:
            attempt("reports of other ranks", partial(loop.votes.hold, loop.step))
    attempt("the journal", lambda: _write_ending(loop, ending))
    for problem in problems:
        loop.warn(problem)
    attempt("trackers", loop.log.trackers.drain)
    loop.log.report_trackers(loop.step)
    if isinstance(error, RunStopped) and loop.ranks.rank:
        error.code = f"healcore stopped the run: {error.why} (rank 0 has the diagnosis)"
    cause = Cause(0) if fault is None else fault.cause
    if other is not None and other.ending not in (None, Ending.COMPLETED):
        ending = other.ending  # what has ended the run is what the first of the ranks says
    _write_end(loop, ending, error, cause, notes)
    if not loop.ranks.rank:
        loop.notes.remove()
    for end in (
        loop.guard.close,
        loop.termination.stop,
        loop.stop_file.close,
        loop.checkpoints.close,
        loop.driver.close,
        partial(release, loop),
        lambda: [loop.log.warning(each) for each in loop.log.trackers.close()],
        loop.metrics.close,
        loop.log.events.close,
    ):
        with contextlib.suppress(Exception):
            end()
    return instead


def _meet(loop: Loop) -> None:
    """Waits until the loops of all ranks have ended. RuntimeError or OSError if one has left."""

    def leave_note() -> None:
        why = f"its loop has ended, and it waits for the other ranks: {_OTHER_LENGTHS}"
        if loop.ranks.rank:
            loop.notes.leave(_note(loop, Ending.COMPLETED, why=why))

    of = f"rank {loop.ranks.rank}, whose loop has ended at step {loop.step},"
    with start_of_ranks.warning_if_late(of, _OTHER_LENGTHS, then=leave_note):
        loop.ranks.gather(None)


def _notes(
    loop: Loop, ending: Ending, error: BaseException | None, fault: Fault | None
) -> list[RankNote]:
    """On rank 0 how the ranks have ended, the first one first; the others leave their notes."""
    completed = ending == Ending.COMPLETED
    note = _note(loop, Ending.EXCEPTION if completed else ending, error, fault)
    if loop.ranks.rank:
        if all(each.rank != note.rank for each in loop.notes.found()):  # see `_meet`
            loop.notes.leave(note)
        return []
    until = time.monotonic() + (_VISIBLE_S if note.follows else 0.0)
    while True:
        found = loop.notes.found()
        if completed:  # as on this rank: they are not the cause
            found = [each for each in found if each.ending != Ending.COMPLETED]
        if any(not each.follows for each in found) or time.monotonic() >= until:
            break
        time.sleep(0.1)
    if found and note.follows and not found[0].follows:
        return [*found, note]
    if is_broken_connection(error):
        lost = f"the connection to another rank broke, and no rank has said why: {AFTER_A_KILL}"
        note = note.model_copy(update={"why": lost})
    return [note, *found]


def _note(
    loop: Loop,
    ending: Ending,
    error: BaseException | None = None,
    fault: Fault | None = None,
    *,
    why: str = "",
) -> RankNote:
    """How this rank has ended."""
    what = trace = ""
    if error is not None:
        what = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
    waited = fault is not None and (Cause.HANG in fault.cause or fault.sign.startswith("nccl"))
    return RankNote(
        rank=loop.ranks.rank,
        ending=ending,
        step=loop.step,
        why=why or _why(error) or what,
        trace=trace,
        cause=[] if fault is None else list(names(fault.cause)),
        sign="" if fault is None else fault.sign,
        follows=waited or is_broken_connection(error),
        time=time.time(),
    )


def _report_other(loop: Loop, note: RankNote) -> Fault | None:
    """Logs the exception of another rank, which has ended the run."""
    if not note.cause:
        return None
    cause = Cause(0)
    for name in note.cause:
        cause |= Cause.__members__.get(name, Cause.UNKNOWN)
    fault = Fault(cause, note.sign)
    loop.faults.report(fault, f"the loop raised on rank {note.rank}: {note.why:.600}", answer=None)
    return fault


def _answer(loop: Loop, fault: Fault, error: Exception) -> None:
    """Logs the exception that ends the run, after a save if the policy has a rule for one."""
    answer, why_not = None, ""
    # The ranks that have not raised do not take part in a save; memory ends with the process.
    alone = loop.ranks.world == 1 and loop.checkpoints.store.disk is not None
    if alone and "save" in loop.policy.answers(fault.cause):
        try:
            why_not = emergency_obstacle(loop)
            if not why_not and not loop.driver.finite():
                why_not = "the weights are not finite"
            why_not = why_not or loop.last_state.save_emergency(loop.step, loop.waiting_batches())
        except Exception as problem:  # a step in JAX that failed may have donated the state
            why_not = f"{type(problem).__name__}: {problem}"
        answer = None if why_not else "save"
    what = "".join(traceback.format_exception_only(error)).strip()
    loop.faults.report(fault, f"the loop raised {what:.600}", answer=answer)
    if why_not:
        loop.warn(f"no checkpoint was saved at the exception: {why_not}")


def emergency_obstacle(loop: Loop) -> str:
    """Counts and reads the last steps; why their state cannot be saved, or ""."""
    if not loop.take_last_step():
        return "the exception interrupted the optimizer's update"
    loop.read_last_steps()
    return loop.last_state.saves.emergency_obstacle(loop.step)


def _lost_on_any(loop: Loop, saved: bool, problems: list[str]) -> bool:
    """Whether the last state is lost on any rank; also if one has left and cannot say."""
    try:
        return any(loop.ranks.gather(_last_state_lost(loop, saved)))
    except Exception as problem:
        problems.append(f"another rank has left: {type(problem).__name__}: {problem}")
        return True


def _last_state_lost(loop: Loop, saved: bool) -> bool:
    """Whether the save of the last state has failed, at once or in the background."""
    if loop.checkpoints.store.disk is None:
        return False  # its checkpoints end with the process in any case
    return loop.step in loop.checkpoints.unsaved or not saved


def _not_saved(loop: Loop, problems: list[str]) -> str:
    store = loop.checkpoints.store
    try:  # the checkpoints that survive the process
        newest = max((save.step for save in (store.disk or store).steps()), default=None)
        target = "starts from the beginning"
        if newest is not None:
            target = f"resumes from the checkpoint of step {newest}"
    except (StoreError, OSError):
        target = "resumes from the newest checkpoint"
    why = loop.checkpoints.last_failure or next(iter(problems), "it failed on another rank")
    return (
        f"healcore: the loop has ended at step {loop.step}, and its last state is not saved "
        f"({why}). Remove the cause and start the program again: it {target}"
    )


def _write_ending(loop: Loop, ending: Ending) -> None:
    """Writes to the journal how the process ended; without it, the process was killed."""
    loop.journal.state.ending = ending
    with contextlib.suppress(Exception):  # a step in JAX that failed may have donated the state
        record_end(loop.journal, loop.driver)
    loop.restorer.write_journal(loop.step)


def release(loop: Loop) -> None:
    """Releases the store's directory; the finalizer is no longer needed."""
    if loop.finalizer is not None:
        loop.finalizer.detach()
    if loop.claim is not None:
        loop.claim.release()


def _write_end(
    loop: Loop, ending: Ending, error: BaseException | None, fault: Cause, notes: list[RankNote]
) -> None:
    """Writes the postmortem and the last event; `notes` are of ranks that have ended alone."""
    exception = trace = None
    if notes and ending == Ending.EXCEPTION:
        exception, trace = f"rank {notes[0].rank}: {notes[0].why}", traces(notes) or None
    elif ending == Ending.EXCEPTION and error is not None:
        exception = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):  # a step in JAX that failed may have donated the state
        loop.read_engines()
    why = loop.left_by_break if ending == Ending.REQUESTED and error is None else _why(error)
    if notes and notes[0].rank != loop.ranks.rank and ending != Ending.EXCEPTION:
        why = f"rank {notes[0].rank}: {notes[0].why}"
    hint = shape_diagnosis(error) if ending == Ending.EXCEPTION else ""
    end = run_end(loop, ending, why, exception, fault, hint)
    # Before the event: the next start looks for a missing postmortem only if there is no end event.
    events = loop.log.events
    if events.path is not None and not loop.ranks.rank:
        found = postmortem.of(end, events, seconds=time.monotonic() - loop.began, trace=trace)
        problem = postmortem.write(postmortem.path_for(events.path, events.run), found)
        if problem:
            loop.log.warning(problem)
    loop.log.event(
        "end",
        step=loop.step,
        ending=ending,
        incidents=end.incidents,
        rollbacks=loop.journal.state.rollbacks,
        last_good=end.last_good,
        unreported_alarms=loop.monitor.unreported_alarms or None,
        of_ranks=of_ranks(notes) or None,
    )
    state = loop.journal.state
    newest = state.newest_on_disk if loop.journal.path is not None else None
    if ending == Ending.COMPLETED and loop.had_completed and loop.resumed_here:
        loop.log.warning(
            f"completed earlier, at step {loop.step}: nothing was trained, and the state is the "
            "saved one; an empty directory begins a new run"
        )
    else:
        loop.log.info(end_line(end, rollbacks=state.rollbacks, newest=newest))


def _why(error: BaseException | None) -> str:
    if isinstance(error, Terminated):
        return f"signal {error.number}"
    if isinstance(error, RunStopped | EndRequested):
        return error.why
    return ""
