"""What a rollback does to the loaders of the steps: rewinds them, and marks batches to skip."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from healcore.runtime.data.positions import BatchId
from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.data.run_loader import RunLoader


def rewind_each(loaders: Iterable[RunLoader], position: Mapping[str, Any]) -> RewindObstacle | None:
    """Rewinds some loaders.

    Loaders that cannot be rewound are tried first. So no loader has moved if one of them fails.

    Args:
        loaders: the loaders. A loader without a position there moves to its start.
        position: the positions of the checkpoint.

    Returns:
        Why a loader could not be rewound, or None.
    """
    for loader in sorted(loaders, key=lambda loader: loader.can_rewind):
        saved = position.get(str(loader.number))
        if not loader.rewind(saved or loader.start):
            return loader.rewind_obstacle or RewindObstacle("it could not be rewound")
        if saved is None:
            loader.call_again()
            loader.next_id = BatchId(loader.first_epoch, 0)
        loader.leave_loop()  # a `break` came after this position, so it is undone too
    return None


def is_within_epoch(position: Mapping[str, Any], loaders: Iterable[RunLoader]) -> bool:
    """Whether one of some loaders stands within an epoch at a position, and not at its start.

    Args:
        position: the positions of the checkpoint.
        loaders: loaders that were not rewound to it.
    """
    for loader in loaders:
        saved = position.get(str(loader.number))
        if saved and saved["index"]:
            return True
    return False


def skip_batches(
    loader: RunLoader,
    to_skip: Collection[BatchId],
    skip_more: int,
    read_again: Sequence[BatchId],
) -> None:
    """Marks the bad batches of a rollback to be skipped.

    Bad batches of earlier rollbacks stay marked, because a deeper rollback reads them again.

    Args:
        loader: the loader that has yielded the batches.
        to_skip: batches to skip.
        skip_more: number of batches after them to skip too, within the epoch.
        read_again: batches that an earlier rollback has skipped, and that are read again now.
    """
    loader.skipped_batch_ids.update(to_skip)
    last = max(to_skip, default=None)
    if last is not None:
        end = loader.length
        for index in range(last.index + 1, last.index + 1 + skip_more):
            if end is None or index < end:
                loader.skipped_batch_ids.add(BatchId(last.epoch, index))
    loader.skipped_batch_ids.difference_update(read_again)
