"""Which checkpoints need not be kept, and which one a restore ends up with.

Never dropped: the newest known-good one, and while there is none, the oldest finite candidate,
which is the nearest to becoming one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from healcore.runtime.store.errors import (
    CheckpointDamaged,
    NoGoodCheckpoint,
    NotThere,
    StoreError,
)
from healcore.runtime.store.protocol import CheckpointStore, Restored, Saved


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
    """In addition: known-good ones older than those, one at each doubling of the distance in steps,
    so that a deep rollback leaves a slow drift behind. At most log2(steps / steps between two
    saves) of them; the first of the run is among them."""

    @property
    def most(self) -> int:
        """The most that ever stay, not counting `older` ones."""
        return self.good + self.candidates + self.quarantined

    def checked(self) -> Keep:
        """Returns itself if its numbers are valid.

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


class RestoreResult(NamedTuple):
    """The checkpoint that was restored."""

    step: int
    restored: Restored
    damaged: tuple[CheckpointDamaged, ...]
    """Errors of the checkpoints that were tried before it."""


def superfluous(saves: Sequence[Saved], keep: Keep) -> list[int]:
    """The steps to delete, ascending; `saves` are all checkpoints of a store, in any order."""
    keep.checked()
    ordered = sorted(saves, key=lambda save: save.step)
    good = [s.step for s in ordered if s.status == "good"]
    bad = [
        s.step
        for s in ordered
        if s.status == "quarantined" or (s.status != "good" and not s.finite)
    ]
    open_ = [s.step for s in ordered if s.status == "candidate" and s.finite]
    newest_good = good[-1] if good else -1
    # A candidate older than a good one was never verified and is not needed any more.
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
    """Deletes what need not be kept; returns the deleted steps."""
    steps = superfluous(store.steps(), keep)
    for step in steps:
        store.delete(step)
    # A TieredStore keeps the last known-good one on disk, however many are in memory.
    left = {saved.step for saved in store.steps()} if steps else set()
    return [step for step in steps if step not in left]


def is_last_good(saves: Sequence[Saved], step: int) -> bool:
    """Whether `step` is known-good and no other checkpoint is."""
    return {save.step for save in saves if save.status == "good"} == {step}


def restore_first_intact(
    store: CheckpointStore,
    order: Sequence[int],
    like: Mapping[str, Any],
    on_damage: Callable[[CheckpointDamaged], None] = lambda error: None,
) -> RestoreResult:
    """Restores the first intact checkpoint of `order`; quarantines the damaged ones before it.

    `on_damage` is called with the error of each damaged one. NoGoodCheckpoint if none is intact;
    StateMismatch if one is of another state, because an older one would not fit either.
    """
    damaged: list[CheckpointDamaged] = []
    for step in order:
        try:
            return RestoreResult(step, store.restore(step, like), tuple(damaged))
        except NotThere:
            continue
        except CheckpointDamaged as error:
            damaged.append(error)
            on_damage(error)
            # A malformed one stays as it is: another version of healcore may be able to read it.
            if not error.malformed:
                _quarantine(store, step)
    reasons = "; ".join(str(error) for error in damaged) or "none of them exists any more"
    raise NoGoodCheckpoint(
        f"none of the checkpoints of steps {list(order)} can be restored: {reasons}"
    )


def _quarantine(store: CheckpointStore, step: int) -> None:
    try:
        store.mark(step, "quarantined")
    except StoreError:
        return  # too damaged to be listed, or the disk cannot be written


def _spaced(good: Sequence[int], newest: int) -> set[int]:
    """Of all but the `newest` of `good` one at each doubling of the distance from the last.

    Of several the oldest stays: with the newest no step would get as far as the next doubling.
    """
    by_doubling = {(good[-1] - step).bit_length(): step for step in reversed(good[:-newest])}
    return set(by_doubling.values())


def _thinned(steps: Sequence[int], most: int) -> list[int]:
    """The steps to take out so that at most `most` stay, spread out.

    The oldest and the newest stay. Of the others the one goes whose neighbours are closest
    together. If the oldest went instead, and saves were more frequent than the probation is long,
    every candidate would go just before it is verified.
    """
    left, out = list(steps), []
    while len(left) > most:
        gaps = [left[i + 1] - left[i - 1] for i in range(1, len(left) - 1)]
        out.append(left.pop(1 + gaps.index(min(gaps))))
    return out
