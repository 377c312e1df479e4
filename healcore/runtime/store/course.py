"""`Course`: which checkpoints belong to the run, computed from numbers in its newest checkpoint.

Each start, resume and rollback begins an attempt at a step, its base. A checkpoint is abandoned if
a later attempt began below its step. The healing state of a checkpoint has the bases of all
attempts so far; so nothing has to be marked, and a crash leaves nothing half marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from healcore.runtime.store.protocol import Saved


class Course(NamedTuple):
    """What a healing state says about all checkpoints of its store."""

    attempts: tuple[int, ...] = ()
    """Base step of each attempt, oldest first. Attempts are numbered from 1."""
    proven: int = -1
    """Finite checkpoints up to this step are known-good."""

    @classmethod
    def of(cls, healing: Mapping[str, Any] | None) -> Course:
        """The course in a healing state. Empty if the healing state has none."""
        attempts, proven = (healing or {}).get("attempts"), (healing or {}).get("proven")
        if not isinstance(attempts, list | tuple) or type(proven) is not int:
            return cls()
        return cls(tuple(each for each in attempts if type(each) is int), proven)

    def abandons(self, step: int, attempt: int) -> bool:
        """Whether an attempt after `attempt` began below `step`."""
        return any(base < step for base in self.attempts[attempt:])

    def judged(self, saves: Iterable[Saved]) -> list[Saved]:
        """The checkpoints with their statuses."""
        return [saved._replace(status=self._status(saved)) for saved in saves]

    def _status(self, saved: Saved) -> Any:
        if self.abandons(saved.step, saved.attempt):
            return "abandoned"
        return "good" if saved.finite and saved.step <= self.proven else "candidate"


def newest(courses: Sequence[tuple[int, Course]]) -> Course:
    """The newest of some courses, each with the step of its checkpoint."""
    return max(courses, key=lambda each: (len(each[1].attempts), each[0]), default=(0, Course()))[1]
