"""The end of the program, which ends the runs that `Healer.start` has opened."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 -- its exit function has to run after `finish`
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn


class ProgramExit(SystemExit):
    """A SystemExit that is recorded when Python reads its status, which ends the program."""

    latest: ClassVar[BaseException | None] = None
    """The exception that ends the program, also of another class."""

    def __getattribute__(self, name: str) -> Any:
        if name == "code":
            ProgramExit.latest = self
        return super().__getattribute__(name)


def call_at_end(end: Callable[[BaseException | None], object]) -> None:
    """Calls `end` with the exception that ends the program, or None, while threads can start.

    If `end` raises SystemExit, its text is printed, and the exit status is 1.
    """
    if sys.exit is not _exit:
        hook = sys.excepthook

        def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
            ProgramExit.latest = error
            hook(kind, error, trace)

        sys.excepthook, sys.exit = excepthook, _exit
    pid = os.getpid()

    def finish() -> None:
        if os.getpid() == pid:
            try:
                end(_cause())
            except SystemExit as problem:
                print(problem, file=sys.stderr)
                atexit.register(_exit_with_status_1)

    getattr(threading, "_register_atexit", atexit.register)(finish)


def _exit(status: Any = None, /) -> NoReturn:
    raise ProgramExit(status)


def _cause() -> BaseException | None:
    """The exception that ends the program, or None for its end and for status 0."""
    error = ProgramExit.latest
    return None if type(error) is ProgramExit and error.code in (None, 0) else error


def _exit_with_status_1() -> None:
    """Runs the other exit functions first, because only `os._exit` sets the status here."""
    atexit.unregister(_exit_with_status_1)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
