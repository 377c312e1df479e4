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
from healcore.core.decision import Cause, names
from healcore.events.models import Ending
from healcore.runtime.faults import Fault, classify
from healcore.runtime.faults.failures import causes_of, is_broken_connection
from healcore.runtime.run.loop import Loop
from healcore.runtime.run.termination import (
    EndRequested,
    IncompleteRun,
    Interrupted,
    LastStateNotSaved,
    RunStopped,
    Terminated,
)
from healcore.runtime.run_options import error_text
from healcore.runtime.store import StoreError
from healcore.runtime.story import postmortem
from healcore.runtime.story.diagnosis import AFTER_A_KILL, last_line
from healcore.runtime.story.postmortem import RankNote, of_ranks, tracebacks_text

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
    # torch's loader raises when the signal has killed its workers too.
    killed = signal_number == signal.SIGTERM and "DataLoader worker" in str(error)
    endings = {
        type(None): Ending.COMPLETED,
        RunStopped: Ending.STOPPED,
        Terminated: Ending.SIGNAL,
        KeyboardInterrupt: Ending.INTERRUPTED,
        EndRequested: Ending.REQUESTED,
        BaseException: Ending.SIGNAL if killed else Ending.EXCEPTION,
    }
    return next(ending for kind, ending in endings.items() if isinstance(error, kind))


def close(loop: Loop, error: BaseException | None) -> BaseException | None:
    """Ends a run. Returns an exception for the block to raise instead of `error`, or None."""
    return _End(loop, error).close()


def release(loop: Loop) -> None:
    """Releases the store's directory."""
    if loop.claim is not None:
        loop.claim.release()


class _End:
    """The end of one run.

    Attributes:
        error: the exception that left the block, or its replacement.
        ending: how the run ends, by `error`.
        raised: the exception of the loop, also as the cause of a stop, or None.
        fault: the classified `raised`, or the exception of another rank, or None.
        notes: on rank 0 of ranks that end alone, the notes of the ended ranks, the cause first.
        problems: errors at the end.
    """

    def __init__(self, loop: Loop, error: BaseException | None) -> None:
        self.loop, self.error = loop, error
        self.ranks, self.saver, self.data = loop.ranks, loop.saver, loop.data
        self.ending = ending_of(error, self.ranks.termination.signal_number)
        self.raised = error.__cause__ if isinstance(error, RunStopped) else error
        self.fault: Fault | None = None
        self.notes: list[RankNote] = []
        self.problems: list[str] = []
        self.memory = ""  # sentence about an out-of-memory error

    def attempt(self, what: str, action: Callable[[], object]) -> Exception | None:
        """Calls an action. Returns its exception, which is a problem named `what`."""
        try:
            action()
        except Exception as problem:
            self.problems.append(f"{what}: {type(problem).__name__}: {problem}")
            return problem
        return None

    def close(self) -> BaseException | None:
        """See `close`."""
        loop, ranks, saver, data = self.loop, self.ranks, self.saver, self.data
        loop.guard.pause()
        # A rank that ends alone, or a step before the others, must not wait for them.
        completed = self.ending == Ending.COMPLETED
        together = completed or ranks.ends_together or ranks.world == 1
        if completed and ranks.world > 1:
            self.raised = self.attempt("another rank has left", self.wait_for_ranks)
            together = self.raised is None
        ends_by_fault = self.ending in (Ending.COMPLETED, Ending.EXCEPTION, Ending.STOPPED)
        if self.raised is not None and ends_by_fault:
            self.fault = classify(self.raised)
        if not together:
            self.collect_notes()
        if completed and together:
            self.attempt("the last steps could not be read", loop.read_remaining)
        replacement: BaseException | None = None
        if together and isinstance(self.error, Terminated | Interrupted | EndRequested):
            try:  # a restart from a later state would not see the orders of the last steps
                self.attempt("the last steps could not be read", loop.act_on_last_steps)
            except RunStopped as stop:
                self.error = replacement = stop
                self.ending = Ending.STOPPED
        between_steps = data.between_steps and not loop.after_update
        other = self.notes[0] if self.notes and self.notes[0].rank != ranks.rank else None
        if other is not None:
            self.report_fault_of(other)
        elif self.fault is not None and isinstance(self.raised, Exception):
            self.attempt("the fault could not be dealt with", self.save_and_log_fault)
        saved = True
        if together and (completed or (between_steps and self.ending != Ending.STOPPED)):
            # Not after an exception within a step, which leaves the state partly changed.
            save = partial(saver.save_last, completed=completed)
            saved = self.attempt("the last state could not be saved", save) is None
        self.attempt("checkpoints being written", saver.wait)
        if completed and (not together or self.is_lost_on_any_rank(saved)):
            # Not "completed", so that the next start resumes and saves the run.
            self.error = replacement = LastStateNotSaved(self.unsaved_state_text())
            self.ending = Ending.EXCEPTION
        elif completed:
            self.error = replacement = _incomplete_run_error(loop)
            self.ending = ending_of(self.error)
            if self.error is None and loop.break_place:
                self.ending = Ending.REQUESTED
        if together:
            self.attempt("checkpoints on probation", saver.poll)
            self.attempt("the last saves", saver.read_nonfinite)
            if ranks.votes:
                self.attempt("reports of other ranks", partial(ranks.vote, data.step, loop.log))
        if self.ending == Ending.COMPLETED:
            loop.record.completed = True
            self.attempt("the record of the end", partial(saver.commit, data.step))
        for problem in self.problems:
            loop.warn(problem)
        loop.log.report_trackers(data.step)
        if isinstance(self.error, RunStopped) and ranks.rank:
            why = self.error.why
            self.error.code = f"healcore stopped the run: {why} (rank 0 has the diagnosis)"
        if other is not None and other.ending not in (None, Ending.COMPLETED):
            self.ending = other.ending  # the first rank to end determines the ending
        self.write()
        if not ranks.rank:
            loop.notes.remove()
        parts = [loop.guard.close, ranks.termination.stop, saver.store.join, loop.driver.close]
        for close_part in (*parts, partial(release, loop), loop.log.close):
            with contextlib.suppress(Exception):
                close_part()
        return replacement

    # -- several ranks --------------------------------------------------------------------------

    def wait_for_ranks(self) -> None:
        """Waits for the end of all ranks' loops. Raises RuntimeError or OSError without a rank."""
        if self.ranks.rank:
            why = f"its loop has ended, and it waits for the other ranks: {_LENGTH_ADVICE}"
            self.loop.notes.leave(self.own_note(Ending.COMPLETED, None, why))
        self.ranks.gather(None)

    def collect_notes(self) -> None:
        """Reads the notes of the ended ranks on rank 0. Other ranks leave a note for rank 0."""
        found, completed = self.loop.notes.found, self.ending == Ending.COMPLETED
        error = self.error or self.raised
        note = self.own_note(Ending.EXCEPTION if completed else self.ending, error)
        if self.ranks.rank:
            if all(each.rank != note.rank for each in found()):  # see `wait_for_ranks`
                self.loop.notes.leave(note)
            return
        until = time.monotonic() + (_VISIBLE_S if note.follows else 0.0)
        while True:
            others = sorted(found(), key=lambda e: (e.follows, e.ending == Ending.COMPLETED))
            if completed:  # other completed ranks are not the cause
                others = [each for each in others if each.ending != Ending.COMPLETED]
            if any(not each.follows for each in others) or time.monotonic() >= until:
                break
            time.sleep(0.1)
        if others and note.follows and not others[0].follows:
            self.notes = [*others, note]
            return
        if is_broken_connection(error):
            lost = f"the connection to another rank broke, and no rank has said why: {AFTER_A_KILL}"
            note = note.model_copy(update={"why": lost})
        self.notes = [note, *others]

    def own_note(self, ending: Ending, error: BaseException | None, why: str = "") -> RankNote:
        """The note about the end of this rank."""
        what, trace = ("", "") if error is None else (error_text(error), _trace(error))
        fault = self.fault
        waited = fault is not None and (Cause.HANG in fault.cause or fault.sign.startswith("nccl"))
        return RankNote(
            rank=self.ranks.rank,
            ending=ending,
            step=self.data.step,
            why=why or _why(error) or what,
            trace=trace,
            cause=[] if fault is None else list(names(fault.cause)),
            sign="" if fault is None else fault.sign,
            follows=waited or is_broken_connection(error),
            time=time.time(),
        )

    def report_fault_of(self, note: RankNote) -> None:
        """Logs the exception of another rank, which has ended the run."""
        self.fault = Fault(causes_of(note.cause), note.sign) if note.cause else None
        if self.fault is not None:
            problem = f"the loop raised on rank {note.rank}: {note.why:.600}"
            self.loop.log.fault(self.data.step, self.fault, problem, answer=None)

    # -- the last state -------------------------------------------------------------------------

    def save_and_log_fault(self) -> None:
        """Saves if a rule of the policy says so, and logs the exception that ends the run."""
        loop, fault, answer, why_not = self.loop, self.fault, None, ""
        assert fault is not None
        assert self.raised is not None
        # The ranks that have not raised do not take part in a save; memory ends with the process.
        alone = self.ranks.world == 1 and self.saver.store.durable
        if alone and "save" in loop.policy.answers(fault.cause):
            why_not = "the exception interrupted the optimizer's update"
            try:
                if loop.count_last_step():
                    list(loop.unread_steps(all=True))
                    why_not = "a restart repeats the step, whose evaluation or log is incomplete"
                    why_not = why_not if loop.after_update else self.saver.save_emergency()
            except StoreError as problem:
                why_not = str(problem)
            except Exception as problem:  # a step in JAX that failed may have donated the state
                why_not = f"{type(problem).__name__}: {problem}"
            answer = None if why_not else "save"
        problem = f"the loop raised {error_text(self.raised):.600}"
        if Cause.OOM in fault.cause:
            self.memory = f". {loop.out_of_memory.profile()}"
            problem += self.memory
        loop.log.fault(self.data.step, fault, problem, answer=answer)
        if why_not:
            loop.warn(f"no checkpoint was saved at the exception: {why_not}")

    def is_lost_on_any_rank(self, saved: bool) -> bool:
        """Whether the last state is lost on any rank. A rank that does not answer counts as lost.

        A store in memory ends with the process in any case.
        """
        lost = self.saver.store.durable and (self.data.step in self.saver.unsaved or not saved)
        try:
            return any(self.ranks.gather(lost))
        except Exception as problem:
            self.problems.append(f"another rank has left: {type(problem).__name__}: {problem}")
            return True

    def unsaved_state_text(self) -> str:
        """The message about a last state that no checkpoint holds."""
        step, saver, target = self.data.step, self.saver, "resumes from the newest checkpoint"
        with contextlib.suppress(StoreError, OSError):  # the checkpoints that survive the process
            steps = saver.store.steps_on_disk()
            target = "starts from the beginning"
            if steps:
                target = f"resumes from the checkpoint of step {max(steps)}"
        why = saver.unsaved.get(step) or next(iter(self.problems), "it failed on another rank")
        return (
            f"healcore: the loop has ended at step {step}, and its last state is not saved "
            f"({why}). Remove the cause and start the program again: it {target}"
        )

    # -- reports --------------------------------------------------------------------------------

    def write(self) -> None:
        """Writes the postmortem and the last event.

        The postmortem comes first: a start writes a missing postmortem only without the event
        `end`.
        """
        loop, ending, error, notes = self.loop, self.ending, self.error, self.notes
        with contextlib.suppress(Exception):  # a step in JAX that failed may have donated the state
            loop.count_last_step()
            loop.recovery.count_last_steps()
            loop.recovery.read_engines()
        why = loop.break_place if ending == Ending.REQUESTED and error is None else _why(error)
        first = f"rank {notes[0].rank}: {notes[0].why}" if notes else ""
        exception = trace = None
        if notes and notes[0].rank != self.ranks.rank and ending != Ending.EXCEPTION:
            why = first
        if notes and ending == Ending.EXCEPTION:
            exception, trace = first, tracebacks_text(notes) or None
        elif ending == Ending.EXCEPTION and error is not None:
            exception, trace = error_text(error) + self.memory, _trace(error)
        cause = Cause(0) if self.fault is None else self.fault.cause
        end = loop.recovery.run_end(ending, why, exception=exception, fault=cause)
        events = loop.log.events
        if events.path is not None and not self.ranks.rank:
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
        saves = [saved for saved in loop.recovery.listed() if saved.status != "abandoned"]
        newest = max((saved.step for saved in saves if saved.path), default=None)
        if ending == Ending.COMPLETED and self.data.had_completed and self.data.resumed_here:
            loop.log.warning(
                f"completed earlier, at step {end.step}: nothing was trained, and the state is the "
                "saved state; an empty directory begins a new run"
            )
        else:
            log = loop.log.error if ending in (Ending.EXCEPTION, Ending.STOPPED) else loop.log.info
            log(last_line(end, newest))


def _incomplete_run_error(loop: Loop) -> BaseException | None:
    """The exception for a loop that has ended by itself with an incomplete run, or None."""
    data, untrained = loop.data, loop.recovery.ledger.untrained
    unread, skipped = len(data.unused), data.skipped_steps
    total = data.step + skipped
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
            "healcore: the loop has ended, and the Healer has seen no step of an optimizer in the "
            f"state ({read} read). Write `{loop_text}`. The next start begins at step {data.step}"
        )
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


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _why(error: BaseException | None) -> str:
    return error.why if isinstance(error, RunStopped | EndRequested | Terminated) else ""
