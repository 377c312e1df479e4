"""Where a run is in its data: going back, leaving out, going on, for any loader."""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.errors import DataError, EmptyLoader, UnusableLoader
from healcore.runtime.data.position import BatchId

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
