"""Endings that are told in plain words and by the exit status, without a traceback.

None is an `Exception`: a loop that catches those ends all the same.
"""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class RunStopped(HealcoreError, SystemExit):
    """The policy ends the run.

    Uncaught, Python prints the diagnosis and the process ends with status 1.

    Attributes:
        diagnosis: what was seen, what was tried, what a person should look at.
        why: what ended it, in a few words.
        last_good: step of the newest known-good checkpoint, None if there is none.
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
    """The run in this directory had completed, and there is nothing left to do.

    Uncaught, the process ends with status 0: a scheduler that starts a program again until it
    succeeds takes the run for done. The line is told when it is raised.
    """

    def __init__(self, line: str) -> None:
        super().__init__(0)
        self.line = line

    def __str__(self) -> str:
        """What lies in the directory, and how to train on."""
        return self.line


class LastStateNotSaved(HealcoreError, SystemExit):
    """The loop has ended, and its last state is in no checkpoint (a full disk, say).

    Uncaught, Python prints the reason and the process ends with status 1. Started again, the
    program goes on from the newest checkpoint.
    """
