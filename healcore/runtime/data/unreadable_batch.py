"""`UnreadableBatch`: takes the place of a batch in a generator that would end with an exception."""

from __future__ import annotations

from dataclasses import dataclass

from healcore.runtime.data.loader_adapter import BatchIterator


@dataclass
class UnreadableBatch:
    """Takes the place of a batch whose reading raised, until the `Cursor` raises the error.

    Trainers read in generators, and a generator that raises is finished. This object passes through
    the generator as a batch, so the next batches can still be read. The user's loop never receives
    it.
    """

    error: Exception
    """The exception of the loader."""


def catch_unreadable(batches: BatchIterator) -> BatchIterator:
    """Yields batches, and an `UnreadableBatch` where reading raises.

    Args:
        batches: the batches of an epoch, which can continue after an exception.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            batch = UnreadableBatch(error)
        yield batch
