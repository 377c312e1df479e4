"""The exceptions that end a program.

They do not derive from `Exception`, so that `except Exception` in a training loop does not catch
them. They end the program without a traceback.
"""

from __future__ import annotations

import signal

from healcore.core.errors import HealcoreError

_newest_end: BaseException | None = None


def newest_end() -> BaseException | None:
    """The newest exception of healcore that ends the program, or None.

    A run without a block (`healcore.start`) closes when Python exits, and does not see the
    exception that has ended the program.
    """
    return _newest_end


def _note(error: BaseException) -> None:
    """Keeps an exception for `newest_end`."""
    global _newest_end
    _newest_end = error


class RunStopped(HealcoreError, SystemExit):
    """The policy ends the run.

    Uncaught, Python prints the diagnosis and the process ends with status 1.

    Attributes:
        diagnosis: the findings, the attempted recoveries, and advice.
        why: the reason, in short.
        last_good: step of the newest known-good checkpoint, or None without one.
    """

    def __init__(self, diagnosis: str, why: str, last_good: int | None) -> None:
        super().__init__(diagnosis)
        self.diagnosis = diagnosis
        self.why = why
        self.last_good = last_good
        _note(self)

    def __str__(self) -> str:
        return self.diagnosis


class _EndsWithStatus0(HealcoreError, SystemExit):
    """Ends the process with status 0, so that torchrun and schedulers do not start it again."""

    def __init__(self, why: str) -> None:
        super().__init__(0)
        self.why = why
        _note(self)

    def __str__(self) -> str:
        return self.why


class AlreadyCompleted(_EndsWithStatus0):
    """A loop trains on although its run had completed. Uncaught, the status is 0.

    The Healer's own iterators (`batches`, `epochs`, `steps`) yield nothing in a completed run, so
    that the program goes on after its loop. A loop that counts its steps itself takes one, and then
    ends with this error. Nothing is saved. `why` says how to continue training.
    """


class EndRequested(_EndsWithStatus0):
    """A stop file has ended the run, or exists when the program starts. Uncaught, the status is 0.

    `why` is the source of the request.
    """


class LastStateNotSaved(HealcoreError, SystemExit):
    """The loop has ended, and no checkpoint holds its last state, for example on a full disk.

    Uncaught, Python prints the reason and the process ends with status 1. Started again, the
    program resumes from the newest checkpoint.
    """


class IncompleteRun(HealcoreError, SystemExit):
    """The loop took no step, took its steps without the Healer, or began at its own step.

    Uncaught, Python prints what is missing in the loop, and the process ends with status 1. The
    next start resumes the run.
    """


class Terminated(HealcoreError, SystemExit):
    """A signal has ended the run; the exit status is the shell's, 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.why = f"signal {number}"
        _note(self)


class Interrupted(HealcoreError, KeyboardInterrupt, SystemExit):
    """Ctrl-C, raised between two steps instead of within one.

    Uncaught, it ends the process with status 130 and no traceback, as SystemExit does. A subclass
    of KeyboardInterrupt alone would end it with status 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.code = 128 + signal.SIGINT
        _note(self)


def exit_for(number: int) -> BaseException:
    """The exception that ends the loop after a signal.

    Args:
        number: number of the signal.
    """
    if number == signal.SIGINT:
        return Interrupted()
    return Terminated(number)
