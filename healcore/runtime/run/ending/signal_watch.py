"""`SignalWatch`: the signals that ask a run to end.

After SIGTERM, Ctrl-C and SIGUSR1 (Slurm's `--signal=USR1@60`) the run finishes the current step and
saves. A program's own handler of Ctrl-C or SIGUSR1 stays. The handler calls the previous handler.
Schedulers repeat a signal, or send SIGINT after SIGTERM: within a second such a signal is ignored,
later it has its usual effect. A second Ctrl-C ends the process at once, like a kill, because a
KeyboardInterrupt would still wait for pending checkpoints. In an interactive session, which must
survive, it is a KeyboardInterrupt. Only the main thread installs handlers, because Python handles
signals only there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from healcore.runtime.run.ending.exits import exit_for

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
        propose: asks all ranks to end, with the number of the signal. None if this process ends
            alone.
    """

    _passes_on = False
    """Whether a handler of a run now calls the handler before it. It is one flag for the process,
    because Python runs signal handlers in the main thread only."""

    def __init__(self, propose: Callable[[int], object] | None = None) -> None:
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

    def start(self) -> bool:
        """Installs the handlers. Called once, when the run begins.

        A program's own handlers of Ctrl-C and SIGUSR1 stay. In a thread other than the main thread
        nothing is installed, because Python permits handlers only in the main thread. A signal then
        has its usual effect, without a save.

        Returns:
            Whether signals are watched: False in another thread than the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        self._pid = os.getpid()
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            is_default = previous in (signal.default_int_handler, signal.SIG_DFL)
            if number == signal.SIGTERM or is_default or _run_of(previous) is not None:
                self._install(number, self._handle)
        return True

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
        this run could not save any more. `_passes_on` marks such a call.
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
            self._propose(number)
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
