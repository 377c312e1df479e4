"""SIGTERM and Ctrl-C: the step under way is finished first, and the run saved.

One handler for all Healers of a process. It goes on to the handler that was there before, and takes
itself off when the first signal has come: a second SIGTERM has its usual effect. A second Ctrl-C
ends the process at once, like a kill: its usual effect, KeyboardInterrupt, would still wait for
checkpoints being written. Where Python has no signals (outside the main thread) nothing is done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from healcore.core.errors import HealcoreError


class Terminated(HealcoreError, SystemExit):
    """The run was asked to end by a signal; its status is the shell's, 128 + the number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


class Interrupted(HealcoreError, KeyboardInterrupt, SystemExit):
    """Ctrl-C, raised between two steps instead of within one.

    Uncaught it ends the process with status 130 and no traceback, as SystemExit does. Python does
    not end by the signal for a subclass of KeyboardInterrupt: that would be status 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.code = 128 + signal.SIGINT


class TerminationWatch:
    """One run's view of it."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """The signal's number, once it has come."""
        self._idle = False

    def watch(self) -> None:
        """Begins."""
        if threading.current_thread() is threading.main_thread():
            _handler.add(self)

    def release(self) -> None:
        """Ends; the last one puts the earlier handlers back."""
        _handler.remove(self)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Between two steps, waiting for data: a signal need not wait for it.

        Raises:
            Terminated, Interrupted: it came, or had come.
        """
        self._idle = True
        try:
            if self.asked is not None:
                raise ending(self.asked)
            yield
        finally:
            self._idle = False

    def note(self, number: int) -> bool:
        """The signal has come. Whether the run can end at once."""
        self.asked = number
        return self._idle


def ending(number: int) -> BaseException:
    """What ends the loop after a signal."""
    return Interrupted() if number == signal.SIGINT else Terminated(number)


class _Handler:
    """The handlers of this process, and the runs that they tell."""

    def __init__(self) -> None:
        self._runs: list[TerminationWatch] = []
        self._before: dict[int, Any] = {}
        self._pid = 0
        self._children: Any = None
        self._interrupts: Any = None
        """What Ctrl-C did before, once a first one has come."""

    def add(self, run: TerminationWatch) -> None:
        self._runs.append(run)
        if self._before:
            return
        self._pid = os.getpid()
        self._take(signal.SIGTERM)
        # A program that has a handler of its own for Ctrl-C knows what it wants.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._take(signal.SIGINT)

    def remove(self, run: TerminationWatch) -> None:
        with suppress(ValueError):
            self._runs.remove(run)
        if not self._runs and threading.current_thread() is threading.main_thread():
            # Elsewhere (the garbage collector runs in any thread) the next signal finds no run.
            self._give_back()
            if self._children is not None:
                signal.signal(signal.SIGCHLD, self._children)
                self._children = None
            if self._interrupts is not None:
                signal.signal(signal.SIGINT, self._interrupts)
                self._interrupts = None

    def _take(self, number: int) -> None:
        self._before[number] = signal.signal(number, self._note)

    def _give_back(self) -> None:
        for number, before in self._before.items():
            # None: it was set by something that is not Python, and cannot be put back from here.
            signal.signal(number, before or signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number) or signal.SIG_DFL
        if os.getpid() != self._pid or not self._runs:
            # A forked child (a data loader's worker) has no run of its own: as if we were not here.
            self._give_back()
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        self._give_back()
        if hasattr(signal, "SIGCHLD") and self._children is None:
            # The scheduler signals the whole process group. torch raises from anywhere when its
            # workers die; we know, and have a run to save.
            self._children = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
        # All of them are told, whichever can end at once.
        idle = [run for run in list(self._runs) if run.note(number)]
        if number == signal.SIGINT:
            self._interrupts = signal.signal(number, self._at_once)
            os.write(2, b"\nhealcore: finishing the step; Ctrl-C again stops at once\n")
        elif callable(before):
            before(number, frame)
        if idle:
            raise ending(number)

    def _at_once(self, number: int, frame: FrameType | None) -> None:
        """A second Ctrl-C. Whatever is on disk is whole, as after a kill."""
        before, self._interrupts = self._interrupts, None
        if os.getpid() != self._pid or not self._runs or hasattr(sys, "ps1"):
            # A forked child, no run any more, or an interactive session, which is to live on.
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        os.write(2, b"\nhealcore: stopped at once; what was on disk before is whole\n")
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(128 + number)


_handler = _Handler()
