"""Restoring the first of several checkpoints that is intact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from healcore.runtime.store.errors import (
    CheckpointDamaged,
    NoGoodCheckpoint,
    NotThere,
    StoreError,
)
from healcore.runtime.store.protocol import CheckpointStore, Restored


class RestoreResult(NamedTuple):
    """The checkpoint that was restored."""

    step: int
    restored: Restored
    damaged: tuple[CheckpointDamaged, ...]
    """Errors of the checkpoints that were tried before it."""


def restore_first_intact(
    store: CheckpointStore,
    order: Sequence[int],
    like: Mapping[str, Any],
    on_damage: Callable[[CheckpointDamaged], None] = lambda error: None,
) -> RestoreResult:
    """Restores the first intact checkpoint, and quarantines and reports the damaged ones before it.

    Args:
        store: the checkpoints.
        order: steps, in the order in which they are tried.
        like: the live state; it is not changed.
        on_damage: called with the error of every damaged checkpoint.

    Raises:
        NoGoodCheckpoint: none is intact.
        StateMismatch: the checkpoint is of another state; an older one would not fit either.
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
