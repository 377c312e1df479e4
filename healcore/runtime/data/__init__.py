"""The position of a run in its data, for any loader: rewind, skip batches, resume."""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.loader_adapters import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
