"""The position of a run in its data, for any loader: rewind, skip batches, resume.

loader_protocols   what healcore looks for in a user's loader
positions          ids of batches, and positions for a checkpoint
loader_adapters    the state of each kind of loader; also torch_loader, function_loader
loader_epoch       the epoch that is read: begin, end, state
batch_stream       batches in order, with ids, read again after failures in the network
cursor             the epochs that a loop asks for, skipped batches, rewinds
run_loader         a cursor, and what the loop does with its batches
loader_registry    all loaders of a run
"""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.positions import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
