"""The process that a guard watches, seen from outside: its state, its stacks, its end.

Standard library only: the guard imports this file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import time
from pathlib import Path

from healcore.runtime.hang_guard.process_signals import END
from healcore.runtime.hang_guard.settings import Settings

_DUMP_S = 5.0
"""Seconds within which a process that can run at all has written its stacks."""
_END_S = 5.0
"""Seconds until SIGKILL follows."""
_LOOK_S = 0.003
_STILL = 4
"""Looks at which the stacks are the same: they seem to be written to their end."""
_MOST_TEXT = 200_000
_DEBUGGERS = ('/bdb.py"', '/pdb.py"', '/pydevd.py"', "/debugpy/")


class WatchedProcess:
    """The process of this guard."""

    def __init__(self, settings: Settings) -> None:
        self._pid, self._stacks = settings.pid, settings.stacks
        self._dump = settings.dump
        self._ident = f"0x{settings.thread:016x}"
        self._handle = os.pidfd_open(self._pid)
        self._poll = select.poll()
        self._poll.register(self._handle, select.POLLIN)

    def gone(self, *, within: float = 0.0) -> bool:
        """Whether it has ended, now or within some seconds."""
        return bool(self._poll.poll(within * 1000))

    # -- what it does ---------------------------------------------------------------------------

    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped it."""
        return self._read("stat").rpartition(")")[2].split()[:1] == ["T"]

    def traced(self) -> bool:
        """Whether a debugger is attached to it."""
        return self._status("TracerPid") not in ("", "0")

    def transferred(self) -> int:
        """Bytes that it has read and written so far, by files and pipes; 0: not known."""
        lines = dict(line.split(": ") for line in self._read("io").splitlines())
        return int(lines.get("rchar", 0)) + int(lines.get("wchar", 0))

    def _catches(self, number: int) -> bool:
        """Whether it has a handler for this signal, which would end it otherwise."""
        return bool(number) and bool(int(self._status("SigCgt") or "0", 16) >> (number - 1) & 1)

    def _status(self, field: str) -> str:
        lines = (line.partition(":") for line in self._read("status").splitlines())
        return next((value.strip() for name, _, value in lines if name == field), "")

    def in_kernel(self) -> str:
        """Where the kernel says that it is, for a process that gives no stacks."""
        found = [
            f"State:\t{self._status('State')}",
            f"wchan: {self._read('wchan') or 'not readable'}",
        ]
        return "\n".join([*found, self._read("stack")]).strip()

    def _read(self, name: str) -> str:
        try:
            return Path(f"/proc/{self._pid}/{name}").read_text(errors="replace")
        except OSError:
            return ""

    # -- its stacks -----------------------------------------------------------------------------

    def stacks(self) -> str:
        """The Python stacks of its threads, the one that trains first; "": it gave none.

        A stopped process is continued for as long as that takes.
        """
        stopped = self.stopped()
        start = os.fstat(self._stacks).st_size
        if self._catches(self._dump):
            self._signal(self._dump)
        if stopped:
            self._signal(signal.SIGCONT)
        text, still, until = "", 0, time.monotonic() + _DUMP_S
        while still < _STILL and time.monotonic() < until:
            time.sleep(_LOOK_S)
            before, text = text, os.pread(self._stacks, _MOST_TEXT, start).decode(errors="replace")
            still = still + 1 if self.training_stack(text) and text == before else 0
        if stopped:
            self._signal(signal.SIGSTOP)
        return self._ordered(text)

    def training_stack(self, stacks: str) -> str:
        """The frames of the thread that trains, in `stacks`; of a busy process only the first ones.

        Not its first line, which says which thread has handled the signal.
        """
        _, header, found = stacks.rpartition(f"hread {self._ident}")
        frames = itertools.takewhile(lambda line: line.startswith("  "), found.split("\n")[1:])
        return "\n".join(frames) if header else ""

    def in_debugger(self, stacks: str) -> bool:
        """Whether the thread that trains waits for a person's input in a debugger."""
        return any(each in self.training_stack(stacks) for each in _DEBUGGERS)

    def _ordered(self, text: str) -> str:
        threads = [each.strip() for each in text.split("\n\n") if each.strip()]
        return "\n\n".join(sorted(threads, key=lambda each: self._ident not in each))

    # -- its end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Ends it with status 62; by SIGKILL if that signal does not reach it."""
        self._signal(END)
        self._signal(signal.SIGCONT)
        if not self.gone(within=_END_S):
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)
