"""`Saved`: a checkpoint in a list. `Course`: which checkpoints belong to the run.

Each start, resume and rollback begins an attempt at a step, its base. A checkpoint is abandoned if
a later attempt began below its step. The healing state of a checkpoint has the bases of all
attempts so far; so nothing has to be marked, and a crash leaves nothing half marked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from healcore.runtime.store.inspection import disallowed

Status = Literal["candidate", "good", "abandoned"]
"""`candidate`: complete, still on probation. `good`: known-good. `abandoned`: saved before a
rollback to an older step, and never restored. Computed, see `Course`."""


class Saved(NamedTuple):
    """One complete checkpoint, as `steps` lists it."""

    step: int
    status: Status
    finite: bool
    """Whether every array is finite, except arrays that `nonfinite_ok` names."""
    bytes: int
    created: float
    """Wall-clock seconds since 1970. Clocks jump: order checkpoints by `step`."""
    attempt: int
    """Number of the attempt that saved the checkpoint, from 1."""
    path: str | None
    """Directory of the checkpoint, or None if it is in memory only."""
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf that `nonfinite_ok` does not name."""

    @classmethod
    def of(cls, record: Any, path: str | None, nonfinite_ok: Collection[str]) -> Saved:
        """The entry of a manifest or a copy in memory. The status follows from `Course.judged`."""
        bad = disallowed(record.nonfinite, nonfinite_ok)
        numbers = record.nbytes, record.created, record.attempt
        return cls(record.step, "candidate", not bad, *numbers, path, bad)


class Restored(NamedTuple):
    """The result of `restore`, in fresh memory."""

    state: dict[str, Any]
    """Name in `like` -> a tree, or the argument of `load_state_dict` for an object with
    `state_dict`."""
    healing: dict[str, Any] | None
    """The healing state, or None if the checkpoint has none."""


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

    @classmethod
    def newest(cls, healings: Mapping[int, Mapping[str, Any]]) -> Course:
        """The course in the newest of some healing states, by step."""
        courses = [(step, cls.of(healing)) for step, healing in healings.items()]
        newest = max(courses, key=lambda each: (len(each[1].attempts), each[0]), default=None)
        return cls() if newest is None else newest[1]

    def abandons(self, step: int, attempt: int) -> bool:
        """Whether an attempt after `attempt` began below `step`."""
        return any(base < step for base in self.attempts[attempt:])

    def judged(self, saves: Iterable[Saved]) -> list[Saved]:
        """The checkpoints with their statuses."""
        return [saved._replace(status=self._status(saved)) for saved in saves]

    def _status(self, saved: Saved) -> Status:
        if self.abandons(saved.step, saved.attempt):
            return "abandoned"
        return "good" if saved.finite and saved.step <= self.proven else "candidate"
