"""Chooses the checkpoints to delete.

The newest known-good checkpoint always stays. While there is none, the oldest finite candidate
stays, because it is the first that can become known-good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.saved import Saved


class Keep(NamedTuple):
    """Number of checkpoints of each kind to keep."""

    good: int = 3
    """The newest known-good checkpoints. A rollback of depth n needs n of them. At least 1."""
    candidates: int = 3
    """Finite checkpoints newer than the newest known-good one. At least 2: the oldest candidate is
    the next known-good checkpoint, and the newest one loses the fewest steps in a restart."""
    older: bool = False
    """Whether to keep older known-good checkpoints too, one at each doubling of the distance in
    steps, including the first of the run, so that a deep rollback can undo a slow drift. Their
    number is at most log2(steps / steps between two saves)."""

    @property
    def most(self) -> int:
        """Largest number of finite checkpoints, without the `older` ones."""
        return self.good + self.candidates

    def checked(self) -> Keep:
        """Returns itself if its numbers are valid.

        Raises:
            StoreError: a number is too small.
        """
        for field, least in (("good", 1), ("candidates", 2)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise StoreError(f"keep.{field} is a whole number >= {least}, not {value!r}")
        if not isinstance(self.older, bool):
            raise StoreError(f"keep.older is True or False, not {self.older!r}")
        return self


def superfluous(saves: Sequence[Saved], keep: Keep, *, nonfinite: int = 2) -> list[int]:
    """The steps to delete, ascending; `saves` are all checkpoints of a store, in any order.

    The newest `nonfinite` checkpoints with NaN or Inf stay: a run may end in such a state.
    """
    keep.checked()
    ordered = sorted(saves, key=lambda save: save.step)
    good = [s.step for s in ordered if s.status == "good"]
    candidates = [s.step for s in ordered if s.status == "candidate" and s.finite]
    bad = [s.step for s in ordered if s.status == "candidate" and not s.finite]
    dropped = {
        *({*good[: -keep.good]} - (_one_per_doubling(good, keep.good) if keep.older else set())),
        *(s.step for s in ordered if s.status == "abandoned"),
        *bad[: len(bad) - nonfinite if len(bad) > nonfinite else 0],
        *_surplus_candidates(candidates, keep.candidates),
    }
    return sorted(dropped)


def _one_per_doubling(good: Sequence[int], newest: int) -> set[int]:
    """One known-good step per doubling of the distance from the last, without the `newest`.

    The oldest step of each doubling stays, because the newest would never reach the next doubling.
    """
    by_doubling = {(good[-1] - step).bit_length(): step for step in reversed(good[:-newest])}
    return set(by_doubling.values())


def _surplus_candidates(steps: Sequence[int], most: int) -> list[int]:
    """The steps to delete so that at most `most` stay, evenly spread.

    The oldest and the newest stay. The step whose neighbours are closest together is deleted first.
    Without the oldest, and with saves more frequent than the probation is long, every candidate
    would be deleted just before it is verified.
    """
    remaining, surplus = list(steps), []
    while len(remaining) > most:
        gaps = [remaining[i + 1] - remaining[i - 1] for i in range(1, len(remaining) - 1)]
        surplus.append(remaining.pop(1 + gaps.index(min(gaps))))
    return surplus
