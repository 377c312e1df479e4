"""The exceptions that end a program, and `RunEnd`.

They do not derive from `Exception`, so that `except Exception` in a training loop does not catch
them. They end the program without a traceback.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from healcore.core.errors import HealcoreError
from healcore.events.models import Ending


class _Exit(HealcoreError, SystemExit):
    """Ends the process, and says why.

    Args:
        code: the exit status, or a text that Python prints before it exits with status 1.
        why: the reason, in short, for the last line of the run; or an empty string.
    """

    ending = Ending.EXCEPTION
    """The kind of end that the exception makes."""

    def __init__(self, code: int | str, why: str = "") -> None:
        super().__init__(code)
        self.why = why


class RunStopped(_Exit):
    """The policy ends the run.

    Uncaught, Python prints the diagnosis and the process ends with status 1.

    Attributes:
        diagnosis: the findings, the attempted recoveries, and advice.
        why: the reason, in short.
        last_good: step of the newest known-good checkpoint, or None without one.
    """

    __module__ = "healcore"

    def __init__(self, diagnosis: str, why: str, last_good: int | None) -> None:
        super().__init__(diagnosis, why)
        self.diagnosis = diagnosis
        self.last_good = last_good


class _EndsWithStatus0(_Exit):
    """Ends the process with status 0, so that torchrun and schedulers do not start it again."""

    def __init__(self, why: str) -> None:
        super().__init__(0, why)

    def _message(self) -> str:
        return self.why


class AlreadyCompleted(_EndsWithStatus0):
    """A loop trains on although its run had completed. Uncaught, the status is 0.

    The Healer's own iterators (`batches`, `epochs`, `steps`) yield nothing in a completed run, so
    that the program continues after its loop. A loop that counts its steps itself takes one, and
    then ends with this error. Nothing is saved. `why` says how to continue training.
    """

    __module__ = "healcore.errors"


class EndRequested(_EndsWithStatus0):
    """A stop file has ended the run, or exists when the program starts.

    If the run has begun, its last state is saved. Uncaught, the process ends with status 0, so that
    a scheduler does not start it again. The file is not removed: each later start ends in the same
    way as long as it exists. `why` is the source of the request.
    """

    __module__ = "healcore.errors"
    ending = Ending.REQUESTED


class LastStateNotSaved(_Exit):
    """The loop has ended, and no checkpoint holds its last state, for example on a full disk.

    Uncaught, Python prints the reason and the process ends with status 1. Started again, the
    program resumes from the newest checkpoint and repeats the steps since. Without this exception
    the program would end with status 0, as if its weights were on disk.
    """

    __module__ = "healcore.errors"


class IncompleteRun(_Exit):
    """The loop took no step, took its steps without the Healer, or began at its own step.

    Uncaught, Python prints what is missing in the loop, and the process ends with status 1. The
    next start resumes the run. With status 0, a scheduler would take a program that has trained
    nothing for a finished training.

    Attributes:
        why: the reason, in short, for the last line of the run; or an empty string.
    """

    __module__ = "healcore.errors"


class Terminated(_Exit):
    """A signal has ended the run: SIGTERM or SIGUSR1.

    It is raised between two steps, or while the run waits for data. Uncaught, the process ends with
    128 + the number of the signal, as a shell reports a killed process. `number` is the number of
    the signal, and `why` names it.
    """

    __module__ = "healcore.errors"
    ending = Ending.SIGNAL

    def __init__(self, number: int) -> None:
        super().__init__(128 + number, f"signal {number}")
        self.number = number


class Interrupted(HealcoreError, KeyboardInterrupt, SystemExit):
    """Ctrl-C, raised between two steps instead of within one.

    Uncaught, it ends the process with status 130 and no traceback, as SystemExit does. A subclass
    of KeyboardInterrupt alone would end it with status 1.
    """

    __module__ = "healcore.errors"

    def __init__(self) -> None:
        super().__init__()
        self.code = 128 + signal.SIGINT


class RunEnd(NamedTuple):
    """How a run has ended."""

    ending: Ending
    """The kind of the end."""
    error: BaseException | None
    """The exception that has ended the run: of the program, of healcore, or None."""


def exit_for(request: int | str) -> BaseException:
    """The exception that ends the loop on a request.

    Args:
        request: the number of a signal, or the reason of another request.

    Returns:
        `Interrupted` for Ctrl-C (SIGINT), `Terminated` for any other signal, or `EndRequested`.
    """
    if isinstance(request, str):
        return EndRequested(request)
    if request == signal.SIGINT:
        return Interrupted()
    return Terminated(request)
