"""Going back: copies of a run in memory, and which of them are known to be good.

A stand-in for a checkpoint store, small enough to read: a copy becomes known-good when `probation`
steps without an alarm have followed it. One that was taken while trouble was brewing never does.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Snapshot(NamedTuple, Generic[T]):
    """A copy of everything that a run goes on from."""

    step: int
    """The step that would have come next."""
    content: T


class Snapshots(Generic[T]):
    """The known-good copies of one run, and the candidates."""

    def __init__(self, every: int = 10, probation: int = 20, keep: int = 4) -> None:
        """Starts empty.

        Args:
            every: steps between two copies.
            probation: steps without an alarm after which a copy is known-good.
            keep: known-good copies kept.
        """
        self._every, self._probation, self._keep = every, probation, keep
        self._good: list[Snapshot[T]] = []
        self._candidates: list[Snapshot[T]] = []

    def due(self, step: int) -> bool:
        """Whether to take a copy before this step."""
        return step % self._every == 0

    def add(self, step: int, content: T) -> None:
        """Adds a candidate. `content` must be a copy: training goes on in place."""
        self._candidates.append(Snapshot(step, content))

    def observe(self, step: int, *, calm: bool) -> None:
        """Says how a step went: an alarm ends the hopes of every candidate taken until then."""
        if not calm:
            self._candidates = [one for one in self._candidates if one.step > step]
            return
        while self._candidates and step - self._candidates[0].step + 1 >= self._probation:
            self._good.append(self._candidates.pop(0))
        del self._good[: -self._keep]

    def go_back(self, depth: int) -> Snapshot[T] | None:
        """The known-good copy `depth` back (1 is the newest), or the oldest that there is.

        Newer ones, and all candidates, are forgotten: they belong to the branch given up. None
        when nothing is known to be good yet.
        """
        self._candidates = []
        if not self._good:
            return None
        del self._good[max(len(self._good) - max(depth, 1), 0) + 1 :]
        return self._good[-1]
