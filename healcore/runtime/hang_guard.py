"""Reports a step that never returns, with the Python stacks of all threads.

A thread measures the time of the current step once a second. Time-outs of libraries (NCCL, gloo)
are independent of it. `docs/faults.md` describes which time counts.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from healcore import console
from healcore.core.decision import Cause
from healcore.events.models import Ending
from healcore.runtime.reporting import postmortem
from healcore.runtime.reporting.diagnosis import RunOutcome, explain
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.ranks import Ranks

EXIT_STATUS = 62
"""Exit status of a process that the guard has ended. No shell, torchrun or sysexits.h uses it."""
_GROWTH = 3.0
"""A step may take this many times the longest step so far."""
_REPORTED_S = 10.0
"""Seconds that another rank waits before it ends, because its exit breaks connections of rank 0,
which writes the report."""
REPORT_TIMEOUT_S = 60.0
"""Seconds that the guard waits for the report before it ends the process."""


class HangGuard:
    """Measures the time of steps in this process.

    The thread runs while a loop runs: `watch` starts it, `rest` ends it.

    The time from `watch` or `resume` to `pause` counts. `watch` restarts from 0.

        training thread   watch ── the step ── pause ── between steps ── watch ── ...
        guard's thread    counts  counts       does not count

    A step hangs after `timeout_s` of the policy, or after three times the longest step so far if
    that is more. The first step compiles, and has a limit of its own.

    Args:
        policy: its rule for hangs and its table `[hang]`.
        ranks: the ranks of the run. Every rank has a guard; rank 0 writes the report.
        log: the log of the run.

    Attributes:
        step: number of optimizer steps of the run, or 0 before the first step of this process.
    """

    def __init__(self, policy: HostPolicy, ranks: Ranks, log: RunLog) -> None:
        self._policy = policy
        self._ends = "stop" in policy.answers(Cause.HANG)
        self._ranks = ranks
        self._log = log
        self.step = 0
        self._counting_since = 0.0
        """Start of the time that counts, by the monotonic clock in seconds, or 0."""
        self._longest_s = 0.0
        """The longest step so far, in seconds."""
        self._training_thread = threading.get_ident()
        self._guards = Cause.HANG in policy.faults
        """Whether a loop is to be watched: the run is open, and its policy has a rule for hangs."""
        self._thread_end: threading.Event | None = None
        """Ends the thread. None while no thread runs."""

    # -- called by the training thread ----------------------------------------------------------

    def watch(self) -> None:
        """Starts to count the time from 0. The time that has counted until now is a step."""
        self.pause()
        self._counting_since = time.monotonic()
        if self._guards and self._thread_end is None:
            self._thread_end = threading.Event()
            run = partial(self._run, self._thread_end)
            threading.Thread(target=run, name="healcore-hang-guard", daemon=True).start()

    def resume(self) -> None:
        """Starts to count the time, unless it counts already.

        For a program whose step begins outside of the loop over batches.
        """
        if not self._counting_since:
            self.watch()

    def pause(self) -> None:
        """Stops counting."""
        if self._counting_since:
            self._longest_s = max(self._longest_s, time.monotonic() - self._counting_since)
            self._counting_since = 0.0

    def rest(self) -> None:
        """Ends the thread until the next `watch`, without waiting for it."""
        self._counting_since = 0.0
        if self._thread_end is not None:
            self._thread_end.set()
            self._thread_end = None

    def close(self) -> None:
        """Ends the thread for good. An iterator that outlives the run starts no other one."""
        self._guards = False
        self.rest()

    @contextmanager
    def excluding_wait(self) -> Iterator[None]:
        """A context whose time does not count: healcore waits on purpose, as a server has asked.

        The step after the wait has its full limit again. A wait in a thread of the program, for
        example in an upload, leaves the time of the training thread as it is.
        """
        counts = self._counting_since and threading.get_ident() == self._training_thread
        if counts:
            self._counting_since = 0.0
        try:
            yield
        finally:
            if counts:
                self._counting_since = time.monotonic()

    # -- the guard's thread ---------------------------------------------------------------------

    def _run(self, end: threading.Event) -> None:
        """Raises an alarm, once for each step that exceeds its limit."""
        rule = self._policy.hang
        poll_s = min(max(rule.timeout_s / 20, 0.02), 1.0)
        start = waited_s = 0.0
        while not end.wait(poll_s):
            if self._counting_since != start:
                start, waited_s = self._counting_since, 0.0
            elif start:  # counted in polls: suspending the job suspends this thread too
                waited_s += poll_s
            limit_s = max(rule.timeout_s, _GROWTH * self._longest_s)
            if not self.step:
                limit_s = max(limit_s, rule.first_step_s)
            if waited_s > limit_s:
                self._alarm(waited_s)
                waited_s = -math.inf

    def _alarm(self, waited_s: float) -> None:
        """Reports this rank's stacks, and ends the process if the policy says so."""
        why = f"rank {self._ranks.rank} has been within one step for {waited_s:.0f} s"
        if self._ends:
            # A failed disk can block the report forever.
            timer = threading.Timer(REPORT_TIMEOUT_S, os._exit, (EXIT_STATUS,))
            timer.daemon = True
            timer.start()
        stacks = _stacks()
        line = why
        if self._ranks.world > 1:  # the event has the stacks of rank 0: another may be the cause
            line = f"{why}\n{stacks}"
        console.warning(line)
        if self._ranks.rank == 0:
            self._report(why, [{"ranks": [0], "stacks": stacks}], waited_s)
        if self._ends:
            if self._ranks.rank != 0:
                time.sleep(_REPORTED_S)
            console.warning(f"the process ends with exit status {EXIT_STATUS}")
            sys.stderr.flush()
            os._exit(EXIT_STATUS)

    def _report(self, why: str, stacks: list[dict[str, Any]], waited_s: float) -> None:
        """Writes the event, and the postmortem if the process ends. Runs on rank 0."""
        step, log = self.step, self._log
        if self._ends:
            answer = "stop"
        else:
            answer = "alert"
        log.event(
            "fault",
            step=step,
            cause=Cause.HANG,
            sign="no step within the time-out",
            problem=why,
            answer=None if self._policy.observes else answer,
            observed=self._policy.observes or None,
            seconds=round(waited_s, 3),
            stacks=stacks,
        )
        if not self._ends or log.events.path is None:
            return
        counts = log.history.counts()
        # The store and the run cannot be asked: a rank hangs.
        hung = RunOutcome(
            log.history,
            Ending.STOPPED,
            step,
            counts,
            why,
            fault=Cause.HANG,
            last_good=max(log.history.good, default=None),
            unrepaired=log.history.unrepaired,
        )
        problem = postmortem.write(log.events.path, hung, stacks=stacks)
        if problem:
            console.warning(problem)
        log.event("stop", step=step, why=why, diagnosis=explain(hung))
        log.event("end", step=step, ending=Ending.STOPPED, incidents=counts.incidents)


def _stacks() -> str:
    """The Python stacks of all threads."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
