"""The end of the program, which ends the runs that `Healer.start` has opened."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 -- its exit function has to run after `finish`
import dis
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

_UNSEEN = "the program has ended by an exception that the Healer did not see: use sys.exit(status)"


class ProgramExit(SystemExit):
    """A SystemExit that is recorded when Python reads its status, which ends the program."""

    @property
    def code(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The exit status, or a text that Python prints."""
        _end.error = self
        return vars(SystemExit)["code"].__get__(self)

    @code.setter
    def code(self, value: Any) -> None:
        vars(SystemExit)["code"].__set__(self, value)


class _End:
    """Records the exception that ends the program, by `sys.excepthook` and `sys.exit`."""

    error: BaseException | None = None
    _watches = False

    def watch(self) -> None:
        """Replaces the two functions, once in a process."""
        if self._watches:
            return
        self._watches, hook = True, sys.excepthook

        def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
            self.error = error
            hook(kind, error, trace)

        def exit(status: Any = None, /) -> NoReturn:
            raise ProgramExit(status)

        sys.excepthook, sys.exit = excepthook, exit

    def cause(self, program: FrameType) -> BaseException | None:
        """The exception that has left the program's outermost frame, or None for status 0."""
        if dis.opname[program.f_code.co_code[program.f_lasti]].startswith("RETURN"):
            return None
        if type(self.error) is ProgramExit and self.error.code in (None, 0):
            return None
        return self.error or SystemExit(_UNSEEN)


_end = _End()


def call_at_end(end: Callable[[BaseException | None], BaseException | None]) -> None:
    """Calls `end` with the exception that ends the program, or None, while threads can start.

    If `end` returns an exception, Python prints it, and the exit status is 1.
    """
    _end.watch()
    pid, program = os.getpid(), sys._getframe()
    while program.f_back is not None:
        program = program.f_back

    def finish() -> None:
        problem = end(_end.cause(program)) if os.getpid() == pid else None
        if problem is not None:
            print(problem, file=sys.stderr)
            atexit.register(_exit_with_status_1)

    getattr(threading, "_register_atexit", atexit.register)(finish)


def _exit_with_status_1() -> None:
    """Runs the other exit functions, and ends the process. An exit function cannot do less."""
    atexit.unregister(_exit_with_status_1)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
