"""Which checkpoints need not be kept. Pure: a list in, step numbers out.

Never dropped: the newest known-good one, and while there is none, the oldest finite candidate,
which is the nearest to becoming one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.protocol import CheckpointStore, Saved


class Keep(NamedTuple):
    """How many checkpoints of each kind stay."""

    good: int = 3
    """Known-good ones, the newest; a rollback of depth n needs n of them. At least 1."""
    candidates: int = 3
    """Finite ones newer than the newest good one, still on probation. At least 2: the oldest is the
    next to be good, the newest has the least to lose."""
    quarantined: int = 2
    """Quarantined and non-finite ones, the newest, for a person to look at."""
    older: bool = False
    """Besides: known-good ones older than those, one at each doubling of the distance in steps, so
    that a deep rollback leaves a slow drift behind. At most log2(steps / steps between two saves)
    of them; the first of the run is among them."""

    @property
    def most(self) -> int:
        """The most that ever stay, `older` ones aside."""
        return self.good + self.candidates + self.quarantined

    def checked(self) -> Keep:
        """Itself.

        Raises:
            StoreError: a number is too small.
        """
        for field, least in (("good", 1), ("candidates", 2), ("quarantined", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise StoreError(f"keep.{field} is a whole number >= {least}, not {value!r}")
        if not isinstance(self.older, bool):
            raise StoreError(f"keep.older is True or False, not {self.older!r}")
        return self


def superfluous(saves: Sequence[Saved], keep: Keep) -> list[int]:
    """The steps to delete, oldest first.

    Args:
        saves: all checkpoints of a store, in any order.
        keep: how many of each kind.
    """
    keep.checked()
    ordered = sorted(saves, key=lambda save: save.step)
    good = [save.step for save in ordered if save.status == "good"]
    bad = [s.step for s in ordered if s.status != "good" and (not s.finite or _set_aside(s))]
    open_ = [s.step for s in ordered if s.status == "candidate" and s.finite]
    newest_good = good[-1] if good else -1
    # A candidate that a newer good one has overtaken was never proven and never will be needed.
    overtaken = [step for step in open_ if step < newest_good]
    waiting = [step for step in open_ if step >= newest_good]
    dropped = {
        *({*good[: -keep.good]} - (_spaced(good, keep.good) if keep.older else set())),
        *(bad[: -keep.quarantined] if keep.quarantined else bad),
        *overtaken,
        *_thinned(waiting, keep.candidates),
    }
    return sorted(dropped)


def prune(store: CheckpointStore, keep: Keep) -> list[int]:
    """Deletes what need not be kept, and says what that was."""
    steps = superfluous(store.steps(), keep)
    for step in steps:
        store.delete(step)
    # In tiers the last known-good one on disk stays, however many there are in memory.
    left = {saved.step for saved in store.steps()} if steps else set()
    return [step for step in steps if step not in left]


def is_last_good(saves: Sequence[Saved], step: int) -> bool:
    """Whether `step` is known-good and no other checkpoint is."""
    good = {save.step for save in saves if save.status == "good"}
    return good == {step}


def _set_aside(save: Saved) -> bool:
    return save.status == "quarantined"


def _spaced(good: Sequence[int], newest: int) -> set[int]:
    """Of all but the `newest` of `good` one at each doubling of the distance from the last.

    Of several the oldest: with the newest no step would ever get as far as the next doubling.
    """
    by_doubling = {(good[-1] - step).bit_length(): step for step in reversed(good[:-newest])}
    return set(by_doubling.values())


def _thinned(steps: Sequence[int], most: int) -> list[int]:
    """What to take out of `steps` so that at most `most` stay, spread out.

    The oldest and the newest stay. In between goes the one whose neighbours are closest together:
    dropping the oldest instead would, with saves more frequent than the probation is long, throw
    every candidate away just before it is proven.
    """
    left, out = list(steps), []
    while len(left) > most:
        gaps = [left[i + 1] - left[i - 1] for i in range(1, len(left) - 1)]
        out.append(left.pop(1 + gaps.index(min(gaps))))
    return out
