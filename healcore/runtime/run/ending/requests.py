"""Requests to end a run: signals, the stop file and votes of the ranks.

After SIGTERM, Ctrl-C and SIGUSR1 (Slurm's `--signal=USR1@60`) the run finishes the current step and
saves. A program's own handler of Ctrl-C or SIGUSR1 stays. The handler calls the previous handler.
Schedulers repeat a signal, or send SIGINT after SIGTERM: within a second such a signal is ignored,
later it has its usual effect. A second Ctrl-C ends the process at once, like a kill, because a
KeyboardInterrupt would still wait for pending checkpoints. In an interactive session, which must
survive, it is a KeyboardInterrupt. Only the main thread installs handlers, because Python handles
signals only there.

`EndRequests`: a signal or a stop file may reach one rank only. This rank must not end alone: the
others would wait for it in their next collective. Instead it makes a proposal:

    self.propose(Proposal("signal 15", signal=15))

The driver marks the steps from then on (`Driver.request_vote`; in torch a bit of the step's own
all_reduce), and every rank reads the mark with the step's record, `LAG` steps later. Then the ranks
exchange their proposals once, and all of them end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import LAG, StepResult
from healcore.runtime.run.ending.exits import EndRequested, exit_for
from healcore.runtime.store.ranks import Ranks

POLL_INTERVAL_S = 1.0
"""Seconds between two checks for the stop file."""
_SIGNALS = [signal.SIGTERM, signal.SIGINT, *filter(None, [getattr(signal, "SIGUSR1", None)])]
"""The signals that ask a run to end. Windows has no SIGUSR1."""
REPEATED_S = 1.0
"""Seconds after a signal in which another one is a repetition."""
_MAX_SLEEP_S = 0.1
"""Max seconds of one sleep, because a Python signal handler does not end a sleep."""


class SignalWatch:
    """The signals that one run has received.

    If a process has several runs, each run installs its handler, and each handler calls the
    previous handler. The run that has begun last has to end first.

    Args:
        propose: asks all ranks to end. None if this process ends alone.
    """

    _passes_on = False
    """Whether a handler of a run now calls the handler before it. It is one flag for the process,
    because Python runs signal handlers in the main thread only."""

    def __init__(self, propose: Callable[[Proposal], object] | None = None) -> None:
        self.signal_number: int | None = None
        """Number of the signal that asks the run to end, or None without one."""
        self._propose = propose
        self._waiting_for_data = False
        self._pid = 0
        """The process that watches, or 0. A forked child has the handlers, but not the run."""
        self._replaced: dict[int, tuple[Any, Any]] = {}
        """Signal -> handler that this object has installed, and the previous handler."""
        self._received: float | None = None
        """Time of the first signal, by the monotonic clock, or None."""

    def start(self) -> None:
        """Installs the handlers. Called once, when the run begins.

        A program's own handlers of Ctrl-C and SIGUSR1 stay. In a thread other than the main thread
        nothing is installed, because Python permits handlers only in the main thread. A signal then
        has its usual effect, without a save.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            is_default = previous in (signal.default_int_handler, signal.SIG_DFL)
            if number == signal.SIGTERM or is_default or _run_of(previous) is not None:
                self._install(number, self._handle)

    def stop(self) -> None:
        """Stops watching, and restores the previous handlers.

        A handler stays if it was replaced, or if another thread calls: it then has no effect.
        """
        self._pid = 0
        if threading.current_thread() is not threading.main_thread():
            return
        for number, (handler, previous) in self._replaced.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, previous)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """A context in which a signal, also an earlier signal, ends a run of one process at once.

        A loader may wait for minutes, and the end of the step would come too late for a scheduler
        that kills the process after a grace period. With several ranks the signal still waits for
        their vote.

        Raises:
            Terminated: after SIGTERM or SIGUSR1.
            Interrupted: after Ctrl-C.
        """
        self._waiting_for_data = True
        try:
            self.raise_if_alone()
            yield
        finally:
            self._waiting_for_data = False

    def raise_if_alone(self) -> None:
        """Raises the exception of a received signal, unless all ranks end together.

        Raises:
            Terminated: after SIGTERM or SIGUSR1.
            Interrupted: after Ctrl-C.
        """
        if self.signal_number is not None and self._propose is None:
            raise exit_for(self.signal_number)

    def sleep(self, seconds: float) -> None:
        """Sleeps, in any thread. Calls `raise_if_alone` often, so that a signal ends the sleep.

        Args:
            seconds: how long, unless a signal ends the sleep.
        """
        until = time.monotonic() + seconds
        self.raise_if_alone()
        left = until - time.monotonic()
        while left > 0:
            time.sleep(min(left, _MAX_SLEEP_S))
            self.raise_if_alone()
            left = until - time.monotonic()

    def _install(self, number: int, handler: Any) -> None:
        """Installs a handler. Keeps the handler from before the run, to restore it at the end."""
        # Python returns None for a handler that it has not set and cannot restore.
        previous = signal.signal(number, handler) or signal.SIG_DFL
        if number in self._replaced:
            _, previous = self._replaced[number]
        self._replaced[number] = handler, previous

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one asks the run to end, a later one has its usual effect.

        Called by Python between two bytecodes of the main thread, wherever the program is.
        """
        if SignalWatch._passes_on:  # called by the handler of a later run
            self._ask_to_end(number, frame)
            return
        since: float | None = None  # seconds since the first signal
        if self._received is not None:
            since = time.monotonic() - self._received
        if self._watches and since is not None and since <= REPEATED_S:
            return
        if not self._watches or since is not None:  # the previous handler decides
            signal.signal(number, self._previous(number))
            os.kill(os.getpid(), number)
            return
        self._ask_to_end(number, frame)
        if self._propose is None and self._waiting_for_data:
            raise exit_for(number)

    @property
    def _watches(self) -> bool:
        """Whether the run is open, and belongs to this process."""
        return os.getpid() == self._pid

    def _previous(self, number: int) -> Any:
        """The handler before this run's, without the handlers of runs that have ended."""
        _, previous = self._replaced[number]
        of_run = _run_of(previous)
        while of_run is not None and not of_run._watches:
            _, previous = of_run._replaced[number]
            of_run = _run_of(previous)
        return previous

    def _ask_to_end(self, number: int, frame: FrameType | None) -> None:
        """Takes note of the first signal, and passes it on to the previous handler.

        That handler may belong to an earlier run, also if another library has wrapped it, as
        Lightning does. The earlier run, if it is open, is asked to end as well. It does nothing if
        it has ended or has received a signal before: a second signal would end the process, and
        this run could not save any more. `_passes_on` tells it so.
        """
        previous = self._previous(number)
        if not self._watches:
            self._pass_on(previous, number, frame)
            return
        if self._received is not None:
            return
        self._received = time.monotonic()
        # A scheduler signals the whole process group. torch's SIGCHLD handler raises anywhere when
        # its workers die, which would interrupt the save.
        if hasattr(signal, "SIGCHLD"):
            self._install(signal.SIGCHLD, signal.SIG_DFL)
        self.signal_number = number
        if self._propose is not None:
            self._propose(Proposal(f"signal {number}", signal=number))
        if number == signal.SIGINT and _run_of(previous) is None:
            # A second Ctrl-C ends the process at once, except in an interactive session.
            is_interactive = hasattr(sys, "ps1")
            self._install(number, previous if is_interactive else signal.SIG_DFL)
        else:
            self._pass_on(previous, number, frame)
        if number == signal.SIGINT:
            os.write(2, b"\nhealcore: finishing the step; Ctrl-C again stops at once\n")

    @staticmethod
    def _pass_on(previous: Any, number: int, frame: FrameType | None) -> None:
        """Calls the previous handler, if there is one, and marks the signal as passed on."""
        if not callable(previous):
            return
        passed_on_before = SignalWatch._passes_on
        SignalWatch._passes_on = True
        try:
            previous(number, frame)
        finally:
            SignalWatch._passes_on = passed_on_before


def _run_of(handler: Any) -> SignalWatch | None:
    """The object of the run to which a signal's handler belongs, or None for another handler."""
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, SignalWatch):
        return owner
    return None


class StopFile:
    """A file by which a person or a scheduler asks a run to end, with its last state saved.

    The file is not removed, so that it ends all programs of a queue.

    Args:
        path: the file, or None for no file.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path: Path | None = None
        if path is not None:
            self.path = Path(path).absolute()  # the program may change its working directory
        self.why = f"the stop file {self.path}"
        self._found = False
        self._next_look = 0.0
        """Time from which the file system is asked again, by the monotonic clock."""

    @property
    def found(self) -> bool:
        """Whether the file exists, or has existed in this run.

        The file system is asked at most once a second, because the property is read at each step
        and the file may be on a network. False without a path.
        """
        now = time.monotonic()
        if self.path is not None and not self._found and now >= self._next_look:
            self._found = os.path.lexists(self.path)
            self._next_look = now + POLL_INTERVAL_S
        return self._found


class Proposal(NamedTuple):
    """Proposal of one rank that all ranks save their last state and end.

    The ranks exchange their proposals in a vote, so that all of them end after the same step. A
    rank that ended alone would leave the other ranks waiting for it.
    """

    why: str
    """The source of the request, for the log: "signal 15", or the path of the stop file."""
    signal: int | None = None
    """Number of the signal that asks the run to end, or None for another reason."""


class EndRequests:
    """The requests to end a run, by signals and the stop file, and the votes of the ranks on them.

    Args:
        ranks: the ranks of the run. One rank alone ends without a vote.
        driver: marks the steps after a proposal, so that all ranks know of it at the same step.
        stop_file: the file whose existence asks for the end.

    Attributes:
        ends_together: whether the ranks have agreed to end after this step.
        stop_file: as given.
        stop_signals: the signals that the process has received.
    """

    def __init__(self, ranks: Ranks, driver: Driver, stop_file: StopFile) -> None:
        self.ends_together = False
        self.stop_file = stop_file
        self.stop_signals = SignalWatch(self.propose if ranks.world > 1 else None)
        self._ranks = ranks
        self._driver = driver
        self._pending: list[Proposal] = []
        """The proposals of this rank, which the next vote exchanges."""
        self._due_at: int | None = None
        """Number of steps done at which the next vote is due, or None."""

    def raise_or_propose(self, *, may_end: bool) -> None:
        """Raises the exception that ends the run if it was requested; with votes proposes the end.

        Args:
            may_end: whether the state can be saved now, so that a rank may end alone.

        Raises:
            EndRequested: the stop file exists.
            Terminated: a signal has asked for the end.
            Interrupted: Ctrl-C has asked for the end.
        """
        if self._ranks.world > 1:  # the next step brings the vote
            proposal = Proposal(self.stop_file.why)
            if self.stop_file.found and proposal not in self._pending:
                self.propose(proposal)
        elif may_end:
            self.stop_signals.raise_if_alone()
            if self.stop_file.found:
                raise EndRequested(self.stop_file.why)

    def propose(self, proposal: Proposal) -> None:
        """Makes a proposal to all ranks, from the training thread or its signal handler.

        Args:
            proposal: why the run should end. All ranks end a few steps later.
        """
        self._pending.append(proposal)
        self._driver.request_vote()

    def note_mark(self, result: StepResult) -> None:
        """Schedules a vote if a step is marked. Called for each step whose records are read.

        The vote is due `LAG` steps after the marked step on every rank. A rank that evaluates alone
        reads the mark earlier than the other ranks, and would otherwise vote alone.

        Args:
            result: the step that was read. Steps that are marked while a vote is due change
                nothing.
        """
        if result.vote_requested and self._due_at is None:
            self._due_at = result.index + 1 + LAG

    def vote_when_due(self, step: int, log: RunLog) -> None:
        """Exchanges the proposals if a vote is due. Collective when it is.

        Args:
            step: steps done.
            log: gets the event of the vote, with the proposals of all ranks.

        Raises:
            EndRequested: the ranks end together, because of a stop file.
            Terminated: the same, because of a signal.
            Interrupted: the same, because of Ctrl-C.
        """
        if self._due_at is None or step < self._due_at:
            return
        of_ranks: list[list[Proposal]] = self._ranks.gather(self._pending)
        proposals: list[Proposal] = []
        listed, reasons = [], []
        for rank, of_rank in enumerate(of_ranks):
            for each in of_rank:
                proposals.append(each)
                listed.append({"rank": rank, "outcome": "end", "why": each.why})
                reasons.append(f"rank {rank}: {each.why}")
        first = proposals[0]
        log.event("vote", step=step, outcome="end", why=first.why, of_ranks=listed)
        log.info(f"step {step}: the ranks end together ({', '.join(reasons):.500})")
        self.ends_together = True
        if first.signal is not None:
            raise exit_for(first.signal)
        raise EndRequested(first.why)

    def on_rollback(self) -> None:
        """Forgets the mark of an undone step, and with it the step of the vote.

        No request is lost: the driver marks each step until the vote, so the first repeated step
        brings the mark again.
        """
        self._due_at = None
