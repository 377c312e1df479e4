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


class Landed(NamedTuple):
    """Where a rollback ended up."""

    step: int
    restored: Restored
    damaged: tuple[CheckpointDamaged, ...]
    """What was wrong with those that were wanted more."""


def restore_first(
    store: CheckpointStore,
    order: Sequence[int],
    like: Mapping[str, Any],
    on_damage: Callable[[CheckpointDamaged], None] = lambda error: None,
) -> Landed:
    """Restores the first intact checkpoint; damaged ones are quarantined and told.

    Args:
        store: the checkpoints.
        order: steps, the wanted one first.
        like: the live state; it is not touched.
        on_damage: told of every damaged one, for an event.

    Raises:
        NoGoodCheckpoint: none is intact.
        StateMismatch: the checkpoint is of another state; no older one would fit better.
    """
    damaged: list[CheckpointDamaged] = []
    for step in order:
        try:
            return Landed(step, store.restore(step, like), tuple(damaged))
        except NotThere:
            continue
        except CheckpointDamaged as error:
            damaged.append(error)
            on_damage(error)
            _quarantine(store, step)
    told = "; ".join(str(error) for error in damaged) or "none of them is there any more"
    raise NoGoodCheckpoint(
        f"none of the checkpoints of steps {list(order)} can be restored: {told}"
    )


def _quarantine(store: CheckpointStore, step: int) -> None:
    try:
        store.mark(step, "quarantined")
    except StoreError:
        return  # so damaged that it is not listed any more, or on a disk that cannot be written
