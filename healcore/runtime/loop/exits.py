"""Exceptions that end the program with a message and an exit status, without a traceback.

None is an `Exception`: `except Exception` in a training loop does not catch them.
"""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class RunStopped(HealcoreError, SystemExit):
    """The policy ends the run.

    Uncaught, Python prints the diagnosis and the process ends with status 1.

    Attributes:
        diagnosis: what was seen, what was tried, what a person should check.
        why: the reason, in a few words.
        last_good: step of the newest known-good checkpoint; None: there is none.
    """

    def __init__(self, diagnosis: str, why: str, last_good: int | None) -> None:
        super().__init__(diagnosis)
        self.diagnosis = diagnosis
        self.why = why
        self.last_good = last_good

    def __str__(self) -> str:
        """The diagnosis."""
        return self.diagnosis


class AlreadyCompleted(HealcoreError, SystemExit):
    """The run in this directory had completed: nothing is left to do.

    Uncaught, the process ends with status 0: a scheduler that restarts a program until it succeeds
    takes the run for done. The line is logged when it is raised.
    """

    def __init__(self, line: str) -> None:
        super().__init__(0)
        self.line = line

    def __str__(self) -> str:
        """What the directory holds, and how to continue training."""
        return self.line


class LastStateNotSaved(HealcoreError, SystemExit):
    """The loop has ended, and no checkpoint holds its last state (because of a full disk, say).

    Uncaught, Python prints the reason and the process ends with status 1. Started again, the
    program resumes from the newest checkpoint.
    """
