"""What readers have to tell on the way: counted all, kept the first hundred."""

from __future__ import annotations

from healcore.tools.traces.trace import Problem

KEPT = 100


class Findings:
    """Problems (damage) and notes (worth knowing) of one pass over a trace."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.problem_count = 0
        self.note_count = 0

    def problem(self, source: str, line: int | None, text: str) -> None:
        """Something that could not be used."""
        self.problem_count += 1
        if len(self.problems) < KEPT:
            self.problems.append(Problem(source, line, text))

    def note(self, source: str, line: int | None, text: str) -> None:
        """Something that was read in a way that should be known."""
        self.note_count += 1
        if len(self.notes) < KEPT:
            self.notes.append(Problem(source, line, text))

    def copy(self) -> Findings:
        """The same so far, for another pass to go on with."""
        other = Findings()
        other.problems, other.notes = list(self.problems), list(self.notes)
        other.problem_count, other.note_count = self.problem_count, self.note_count
        return other
