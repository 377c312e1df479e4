"""The position of a run in its data, for any loader: rewind, skip batches, resume."""

from healcore.runtime.data.cursor import Cursor, UnusableLoader
from healcore.runtime.data.epoch_reader import EmptyLoader
from healcore.runtime.data.position import BatchId, DataError

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
