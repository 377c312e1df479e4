"""Notices a step that never returns: writes the Python stacks of all threads, of every rank.

A thread looks once a second how long the current step has lasted. What a library does about its own
waits (the time-outs of NCCL and gloo) is left to it. `docs/hang.md` describes what counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from healcore import console
from healcore.core.verdict import Cause, names
from healcore.events.models import Ending
from healcore.policy.recovery import Hang
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.rank_notes import RankNote, RankNotes
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

EXIT_STATUS = 62
"""Of a process that the guard has ended. No shell, torchrun or sysexits.h uses it."""
_GROWTH = 3.0
"""A step may take this many times the longest so far."""
_LATE_S = 1.0
"""Seconds by which a look may be late, at most; more is time in which the process slept."""
_OTHERS_S = 5.0
"""Seconds for which rank 0 waits for the stacks of the others."""
_REPORT_S = 30.0
"""Seconds that the report may take before the process is ended without it: a dead disk holds it."""
_MOST_SHOWN = 8
_DEBUGGERS = (
    f"{os.sep}bdb.py",
    f"{os.sep}pdb.py",
    f"{os.sep}pydevd.py",
    f"{os.sep}debugpy{os.sep}",
)


class HangGuard:
    """The guard of this process. Before `start` it does nothing.

    Time counts from `watch` or `resume` to `pause`, and from 0 again with each `watch`.
    """

    def __init__(self) -> None:
        self._began = self._longest = 0.0
        """Time of `watch`, or 0 while no time counts; the longest so far, in seconds."""
        self._has_stepped = self._between_steps = False
        self._step = 0
        self._training = threading.get_ident()
        self._closed = threading.Event()

    def start(
        self,
        rule: Hang,
        *,
        ends: bool,
        observes: bool,
        ranks: Ranks,
        log: RunLog,
        notes: RankNotes,
    ) -> None:
        """Starts the thread.

        Args:
            rule: of the policy.
            ends: whether the policy ends a process that hangs.
            observes: whether the policy only observes.
            ranks: of the run.
            log: of this rank.
            notes: of the run.
        """
        self._rule, self._ends, self._observes = rule, ends and not observes, observes
        self._rank, self._world, self._log, self._notes = ranks.rank, ranks.world, log, notes
        self._between_steps = rule.between_steps
        threading.Thread(target=self._run, name="healcore-hang-guard", daemon=True).start()

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._closed.set()

    # -- the thread that trains -----------------------------------------------------------------

    def watch(self) -> None:
        """From now on the time counts, from 0."""
        now = time.monotonic()
        if self._began and now - self._began > self._longest:
            self._longest = now - self._began
        self._began = now

    def resume(self) -> None:
        """From now on the time counts, if it does not already."""
        if not self._began:
            self._began = time.monotonic()

    def pause(self) -> None:
        """From now on the time does not count, unless the policy counts what follows a step."""
        self.watch()
        if not self._between_steps:
            self._began = 0.0

    def on_step(self) -> None:
        """Called by the driver when an optimizer has stepped: what follows may take any time."""
        self._has_stepped = True
        self.pause()

    def stepped(self, step: int) -> None:
        """The run has done so many optimizer steps."""
        self._step, self._has_stepped = step, True

    # -- the thread that looks ------------------------------------------------------------------

    def _run(self) -> None:
        look_s = min(max(self._rule.timeout_s / 20, 0.02), 1.0)
        looked, since, waited, last_alarm = time.monotonic(), 0.0, 0.0, 0.0
        while not self._closed.wait(look_s):
            now = time.monotonic()
            # A job that is suspended (Ctrl-Z, a paused container) suspends this thread too.
            passed, looked = min(now - looked, look_s + _LATE_S), now
            if self._began != since:
                since, waited, last_alarm = self._began, 0.0, 0.0
            elif since:
                waited += passed
            if waited > max(self._limit, 2 * last_alarm):
                last_alarm = waited
                self._alarm(waited)

    @property
    def _limit(self) -> float:
        first = 0.0 if self._has_stepped else self._rule.first_step_s
        return max(self._rule.timeout_s, first, _GROWTH * self._longest)

    def _alarm(self, waited: float) -> None:
        """Reports this rank's stacks, and ends the process if the policy says so."""
        stacks = self._stacks()
        ends = self._ends and not any(each in stacks for each in _DEBUGGERS)
        why = f"rank {self._rank} has been within one step for {waited:.0f} s"
        note = RankNote(rank=self._rank, step=self._step, why=why, trace=stacks, time=time.time())
        ending = f"; it ends with exit status {EXIT_STATUS}" if ends else ""
        console.warning(f"{why}{ending}")
        report: Callable[[], None] = lambda: self._notes.leave(note)  # noqa: E731
        if self._rank == 0:
            report = lambda: self._report(note, waited, ends=ends)  # noqa: E731
        # In a thread of its own: a disk that is dead would hold it for ever.
        writer = threading.Thread(target=report, name="healcore-hang-report", daemon=True)
        writer.start()
        writer.join(_REPORT_S)
        if ends:
            self._wait_for_report(note)
            sys.stderr.flush()
            os._exit(EXIT_STATUS)

    def _wait_for_report(self, note: RankNote) -> None:
        """Lets the others know that rank 0 has reported, or waits for it, but not for ever."""
        if not self._rank:
            self._notes.leave(note)
            return
        until = time.monotonic() + _REPORT_S
        while time.monotonic() < until:  # this process holds a connection that rank 0 waits on
            if any(each.rank == 0 for each in self._notes.found(hangs=True)):
                return
            time.sleep(0.1)

    def _stacks(self) -> str:
        """The stacks of all threads, the one that trains first."""
        known = {each.ident: each.name for each in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        return "\n".join(
            f"Thread {known.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident]))
            for ident in sorted(frames, key=lambda ident: ident != self._training)
        )

    def _report(self, mine: RankNote, waited: float, *, ends: bool) -> None:
        """Writes the event and, if the process is ended, the postmortem. On rank 0."""
        until = time.monotonic() + _OTHERS_S
        found = [mine, *self._notes.found(hangs=True)]
        while len(found) < self._world and time.monotonic() < until:
            time.sleep(0.1)
            found = [mine, *self._notes.found(hangs=True)]
        why = mine.why
        missing = sorted({*range(self._world)} - {each.rank for each in found})
        if missing:
            why += f"; rank {_listed(missing)} has not answered"
        stacks = postmortem.stacks_of(found)
        self._log.event(
            "fault",
            step=mine.step,
            cause=names(Cause.HANG),
            sign="no step within the time-out",
            problem=why,
            answer=None if self._observes else "stop" if ends else "alert",
            observed=True if self._observes else None,
            seconds=round(waited, 3),
            stacks=stacks,
        )
        events = self._log.events
        if not ends or events.path is None:
            return
        hung = postmortem.of_hung(events.path, step=mine.step, why=why, stacks=stacks)
        problem = postmortem.write(postmortem.path_for(events.path, events.run), hung)
        if problem:
            console.warning(problem)
        self._log.event("stop", step=mine.step, why=why, diagnosis=postmortem.explain(hung.end))
        self._log.event("end", step=mine.step, ending=Ending.STOPPED, incidents=hung.end.incidents)


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
    return ", ".join(map(str, ranks[:_MOST_SHOWN])) + more
