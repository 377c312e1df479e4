"""How a run ends before its time: by the policy, with a diagnosis in plain words."""

from __future__ import annotations


class RunStopped(SystemExit):
    """The policy ends the run. Not an `Exception`: a loop that catches those ends all the same.

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
